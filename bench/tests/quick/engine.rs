//! The benchmarks of the engine: `engine`, `compression`, `free-pages`.

use serde_json::Value;

use super::{assert_positive, assert_ratios, rows, run, run_with_plots};

#[test]
fn engine_prints_the_documented_json() {
    let results = run("engine");
    for key in ["cpu", "kernel", "kvm"] {
        assert!(results["machine"][key].is_string(), "{key}");
    }
    assert!(results["machine"]["cores"].as_u64() > Some(0));
    assert_eq!(rows(&results).len(), 18, "6 methods, with 1, 2 and 4 channels");
    for row in rows(&results) {
        assert_positive(row, &["pages_per_s", "mb_per_s", "total_ms", "cpu_s"]);
    }
    assert!(results["yardsticks"].as_object().is_some_and(|limits| limits.len() == 7));
    assert_ratios(&results, &["plain_of_raw_socket", "tls_of_raw_rustls"]);
}

/// Needs KVM, because the guest of threads has no balloon.
#[test]
#[ignore = "slow: `make test-all` runs it"]
fn free_pages_prints_the_documented_json() {
    vmferry_kit::need_kvm();
    let results = run("free-pages");
    assert_eq!(rows(&results).len(), 4, "an idle and a busy guest, without hints and with them");
    for row in rows(&results) {
        assert_positive(row, &["total_ms", "sent_mb", "nonfree_mb", "source_cpu_s"]);
        assert_eq!(row["hinted_mb"].as_f64() > Some(0.0), row["hints"] == "yes", "{row}");
    }
    for ratio in ["idle_8g_reduction", "busy_8g_reduction", "sent_over_nonfree", "guest_work_ratio"]
    {
        assert!(results["ratios"][ratio].is_number(), "{ratio}");
    }
}

fn converges_only_compressed(results: &Value) -> bool {
    let outcomes = results["converge"].as_array().unwrap();
    let outcome = |way: &str| &outcomes.iter().find(|row| row["way"] == way).unwrap()["outcome"];
    outcome("none") == "refused" && outcome("auto") == "handed over"
}

#[test]
fn compression_prints_the_documented_json() {
    let results = run_with_plots("compression");
    for way in ["raw", "zlib per call", "zlib pipeline", "lz4", "zstd:1", "zstd:3", "auto"] {
        assert!(rows(&results).iter().any(|row| row["way"] == way), "{way}");
    }
    for row in rows(&results) {
        assert_positive(row, &["pages_per_s", "wire_mb_per_s", "ratio", "source_cpu_s_per_gib"]);
    }
    for row in results["profile"].as_array().unwrap() {
        let allocates = row["allocations_per_page"].as_f64() >= Some(1.0);
        assert_eq!(allocates, row["way"] == "zlib per call", "{row}");
    }
    assert_ratios(
        &results,
        &[
            "pipeline_over_percall_zlib",
            "auto_over_percall_zlib_uncapped",
            "auto_of_link_limit_350mbit",
            "auto_of_link_limit_350mbit_program",
            "auto_over_raw_uncapped",
            "auto_worst_over_best_fixed",
            "delta_over_best_nodelta_hot",
            "migration_thread_cpu_share",
        ],
    );
    assert!(results["ratios"]["allocations_per_page"].as_f64() < Some(1.0), "{results}");
    // On a machine with too little processor time even a compressed guest may not converge.
    let again = || converges_only_compressed(&run_with_plots("compression"));
    assert!(converges_only_compressed(&results) || again() || again(), "{results}");
    assert!(results["codecs"].as_array().is_some_and(|codecs| codecs.len() >= 8), "{results}");
}
