//! The benchmarks of links: `socket` and `transport`.

use serde_json::Value;

use super::{assert_positive, assert_ratios, rows, run_with_messages};

/// The places that a benchmark used: without root there are no network namespaces.
fn places(messages: &str) -> &'static [&'static str] {
    match messages.contains("no network namespaces") {
        true => &["loopback"],
        false => &["loopback", "namespaces"],
    }
}

#[test]
#[ignore = "slow: `make test-all` runs it"]
fn socket_prints_the_documented_json() {
    let (results, messages) = run_with_messages("socket");
    let congestion_control = results["machine"]["tcp"].as_str();
    assert!(congestion_control.is_some_and(|name| !name.is_empty()), "{results}");
    let count = 26 * places(&messages).len();
    assert_eq!(rows(&results).len(), count, "20 methods without encryption and 6 with it");
    for row in rows(&results) {
        // A method that the kernel does not support has a note instead of numbers.
        if row["note"].as_str().is_some_and(|note| note.starts_with("not here")) {
            assert!(row["mb_per_s"].is_null(), "{row}");
            continue;
        }
        assert_positive(
            row,
            &["mb_per_s", "total_ms", "cpu_s_per_gib", "speed_of_first", "frames_out"],
        );
    }
    for place in places(&messages) {
        assert!(results["yardsticks"][format!("raw_socket_{place}_mb_per_s")].is_number());
        assert_ratios(&results, &[&format!("writev_of_raw_socket_{place}")]);
        let wanted = |row: &&Value| row["place"] == *place;
        let row = results["places"].as_array().unwrap().iter().find(wanted);
        assert!(row.is_some_and(|row| row["congestion_control"].is_string()), "{results}");
    }
}

#[test]
#[ignore = "slow: `make test-all` runs it"]
fn transport_prints_the_documented_json() {
    let (results, messages) = run_with_messages("transport");
    let is_compiled_in =
        |way: &str| !messages.contains(&format!("transport: {way} is not compiled in"));
    let cap = results["yardsticks"]["cap_mb_per_s"].as_f64().unwrap();
    for place in places(&messages) {
        let row = |link, way| {
            let wanted =
                |row: &&Value| row["place"] == *place && row["link"] == link && row["way"] == way;
            rows(&results).iter().find(wanted).unwrap_or_else(|| panic!("{place}, {link}, {way}"))
        };
        for way in ["raw socket", "raw rustls"] {
            row("uncapped", way);
        }
        let ways = ["tcp", "tls", "grpc", "grpc-ack"];
        for way in ways.into_iter().filter(|way| is_compiled_in(way)) {
            row("uncapped", way);
            let capped = row("capped", way)["mb_per_s"].as_f64().unwrap();
            assert!(capped < 1.1 * cap, "{way} exceeds the cap: {capped}");
        }
        assert!(results["yardsticks"][format!("raw_rustls_2ch_{place}_mb_per_s")].is_number());
    }
    assert!(rows(&results).iter().any(|row| row["way"] == "unix"));
    for row in rows(&results) {
        assert_positive(
            row,
            &["total_ms", "mb_per_s", "source_cpu_s_per_gb", "destination_cpu_s_per_gb"],
        );
        let idle = |key: &str| row[format!("idle_cpu_percent_{key}")].as_f64().unwrap();
        assert!(idle("min") <= idle("mean") && idle("mean") <= idle("max"), "{row}");
    }
    assert_ratios(
        &results,
        &[
            "plain_of_raw_socket",
            "plain_of_raw_socket_2ch_loopback",
            "tls_of_raw_rustls",
            "tls_over_plain_capped",
            "tls_cpu_over_plain",
            "under_attack_over_quiet",
        ],
    );
    if is_compiled_in("grpc") {
        assert_ratios(
            &results,
            &["grpc_streamed_over_plain_capped", "grpc_streamed_over_acknowledged_uncapped"],
        );
    }
    assert_eq!(results["published"][1]["published_s"], 44.0);
    assert_positive(&results["under_attack"][1], &["failed_handshakes"]);
}
