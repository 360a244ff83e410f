//! The benchmark of libvirt. It needs root, and the `vmferry` command in the directory of the
//! benchmark, where the workspace's tests build it.

use super::{assert_positive, assert_ratios, rows, run};

#[test]
#[ignore = "slow: `make test-all` runs it"]
fn libvirt_prints_the_documented_json() {
    let results = run("libvirt");
    assert_eq!(rows(&results).len(), 10, "2 links with 4 ways each, and 2 ways with a disk");
    for row in rows(&results) {
        let figures =
            ["total_ms", "downtime_ms", "wire_mb", "source_cpu_s", "destination_cpu_s", "cpu_s"];
        assert_positive(row, &figures);
    }
    assert_ratios(
        &results,
        &[
            "total_uncapped_over_plain",
            "total_uncapped_over_tls",
            "total_capped_over_tls",
            "cpu_uncapped_over_tls",
            "disk_capped_over_nbd_tls",
        ],
    );
    assert_eq!(results["ratios"]["failed_with_10s_cut"], 0.0);
    let cuts = results["link_cut_for_10_s"].as_array().unwrap();
    assert!(cuts.iter().all(|row| row["lost"] == 0 && row["cut_at_source"].is_u64()), "{cuts:?}");
}
