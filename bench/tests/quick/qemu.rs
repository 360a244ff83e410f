//! The benchmarks of QEMU guests: `qemu` and `carried`. They need the `vmferry` command in the
//! directory of the benchmark, where the workspace's tests build it.

use serde_json::Value;

use super::{assert_positive, assert_ratios, rows, run};

const FIGURES: [&str; 4] = ["total_ms", "downtime_ms", "sent_mb", "cpu_s"];

#[test]
#[ignore = "slow: `make test-all` runs it"]
fn qemu_prints_the_documented_json() {
    let results = run("qemu");
    assert_eq!(rows(&results).len(), 7, "QEMU: 3 methods, vmferry: 2, and one of each with TLS");
    for row in rows(&results) {
        assert_positive(row, &FIGURES);
    }
    assert_ratios(&results, &["total_idle", "downtime_idle", "cpu_idle", "total_idle_tls"]);
}

#[test]
#[ignore = "slow: `make test-all` runs it"]
fn carried_prints_the_documented_json() {
    let results = run("carried");
    assert_eq!(rows(&results).len(), 24, "2 links, 3 guests, 2 methods each of QEMU and vmferry");
    for row in rows(&results) {
        assert_positive(row, &FIGURES);
    }
    let sent = |link: &str, guest: &str, way: &str| {
        let wanted = |row: &&Value| {
            row["link"] == link
                && row["guest"] == guest
                && row["way"].as_str().is_some_and(|name| name.starts_with(way))
        };
        rows(&results).iter().find(wanted).and_then(|row| row["sent_mb"].as_f64()).unwrap()
    };
    // On a slow link vmferry compresses, however busy the machine is.
    let (qemu, vmferry) = (sent("capped", "program", "QEMU"), sent("capped", "program", "carried"));
    assert!(vmferry < 0.8 * qemu, "{vmferry} of {qemu}");
    assert_ratios(
        &results,
        &["total_uncapped", "total_capped", "cpu_uncapped", "carried_of_raw_rustls"],
    );
    for guest in ["program", "hot", "hot_random"] {
        for figure in ["total_uncapped", "total_capped", "cpu_uncapped", "downtime_capped"] {
            assert_ratios(&results, &[&format!("{figure}_{guest}")]);
        }
    }
    assert_eq!(results["aims"].as_array().map(Vec::len), Some(3));
}
