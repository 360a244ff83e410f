//! The benchmarks of memory and pages: `place`, `bitmap`, `dirty-log`, `faults`.

use super::{assert_positive, assert_ratios, rows, run, run_with_plots};

#[test]
#[ignore = "slow: `make test-all` runs it"]
fn place_prints_the_documented_json() {
    let results = run("place");
    assert!(rows(&results).len() >= 8, "{results}");
    assert_ratios(&results, &["vmferry_of_store_2_threads"]);
}

#[test]
fn bitmap_prints_the_documented_json() {
    let results = run_with_plots("bitmap");
    for row in rows(&results) {
        assert_positive(row, &["us"]);
    }
    let migrations = results["migrations"].as_array().unwrap();
    assert_eq!(migrations.len(), 2, "a guest that reads and one that writes");
    for row in migrations {
        assert_positive(row, &["calls", "byte_ms"]);
    }
    for case in ["clean", "1pct_clustered", "1pct_scattered"] {
        let ratios = ["byte", "word"].map(|way| format!("{way}_over_best_{case}"));
        assert_ratios(&results, &ratios.each_ref().map(String::as_str));
    }
    assert!(results["ratios"]["flat_simd_of_memory_bandwidth_1tib"].is_number(), "{results}");
}

#[test]
fn faults_prints_the_documented_json() {
    let results = run_with_plots("faults");
    assert_eq!(rows(&results).len(), 16, "3 numbers of threads, 5 of descriptors; fetched");
    for row in rows(&results) {
        assert_positive(row, &["faults_per_s", "mean_us", "p50_us", "p99_us", "max_us"]);
    }
    for threads in [1, 8, 64] {
        let name = format!("faults_{threads}_threads_best_over_one_descriptor");
        assert_ratios(&results, &[&name]);
    }
    assert_ratios(&results, &["fetched_p50_over_floor"]);
    assert_positive(&results["yardsticks"], &["copy_pages_per_s", "post_copy_floor_p50_us"]);
}

#[test]
#[ignore = "slow: `make test-all` runs it"]
fn dirty_log_prints_the_documented_json() {
    let results = run_with_plots("dirty-log");
    for log in ["get.org", "get.opt", "switch", "AtomicBitmap", "userfaultfd"] {
        for table in ["gui", "live", "density"] {
            let wanted = |row: &serde_json::Value| row["log"] == log && row["table"] == table;
            assert!(rows(&results).iter().any(wanted), "{log}, {table}");
        }
    }
    assert_ratios(
        &results,
        &[
            "get_org_over_switch_clean_4g",
            "get_opt_over_switch_1pct_4g",
            "switch_clean_4g_over_32k",
            "atomic_bitmap_over_switch_1pct_4g",
            "atomic_bitmap_over_switch_1pct_scattered_4g",
            "atomic_bitmap_over_switch_clean_4g",
            "mark_over_fetch_or",
        ],
    );
}
