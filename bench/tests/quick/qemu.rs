//! The benchmarks of QEMU guests: `qemu`, `storage`, `fleet`, `carried` and `post-copy`. They need
//! the `vmferry` command in the directory of the benchmark, where the workspace's tests build it.

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
fn storage_prints_the_documented_json() {
    vmferry_kit::need_kvm();
    let results = run("storage");
    let [compared, other] = &rows(&results)[..] else { panic!("{results}") };
    assert_positive(compared, &["source_ms", "destination_ms", "downtime_ms"]);
    assert_positive(other, &["downtime_ms"]);
    assert_ratios(&results, &["downtime_compared"]);
}

#[test]
#[ignore = "slow: `make test-all` runs it"]
fn fleet_prints_the_documented_json() {
    vmferry_kit::need_kvm();
    let results = run("fleet");
    assert_eq!(rows(&results).len(), 2, "with the witness, and without");
    for row in rows(&results) {
        assert_positive(row, &["downtime_ms", "commit_ms", "total_ms"]);
    }
    let table = |name: &str| results[name].as_array().unwrap();
    assert_eq!(table("moves").len(), 2, "by order, and by `send`");
    for row in table("moves") {
        assert_positive(row, &["first_page_ms", "total_ms"]);
    }
    for row in table("etcd_for_one_order") {
        assert_positive(row, &["transactions"]);
    }
    for row in table("agent") {
        assert_positive(row, &["rss_mib", "peak_rss_mib"]);
    }
    assert_ratios(&results, &["etcd_transactions_per_migration", "agent_rss_mib"]);
    // These are differences, which may be negative in one run.
    for name in ["witness_downtime_ms", "witness_commit_ms", "move_overhead_ms"] {
        assert!(results["ratios"][name].is_number(), "{name}");
    }
    assert_eq!(table("aims").len(), 4);
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

#[test]
#[ignore = "slow: `make test-all` runs it"]
fn post_copy_prints_the_documented_json() {
    vmferry_kit::need_kvm();
    let results = run("post-copy");
    let expected = 2 * 5 + 3;
    assert_eq!(rows(&results).len(), expected, "5 ways on 2 links, and 3 with many missing pages");
    for row in rows(&results) {
        // A small guest may find all its pages before it touches them.
        assert_positive(row, &["missing_pages", "fetch_ms", "fetch_mb_per_s", "downtime_ms"]);
        let is_ours = row["way"].as_str().is_some_and(|way| !way.starts_with("QEMU"));
        assert_eq!(row["precopy_mb_per_s"].as_f64() > Some(0.0), is_ours, "{row}");
    }
    assert!(results["yardsticks"]["post_copy_floor_p50_us"].as_f64() > Some(0.0));
    for link in ["uncapped", "capped", "many_missing"] {
        for figure in ["fault_mean_over_qemu", "fault_p99_over_qemu", "downtime_hot_over_qemu"] {
            // Without a wait of QEMU's small guest it is no number.
            let name = format!("{figure}_{link}");
            assert!(results["ratios"].get(&name).is_some(), "{name}");
        }
        let work = format!("guest_work_over_qemu_{link}");
        assert_ratios(&results, &[&work, &format!("drain_over_precopy_throughput_{link}")]);
    }
    assert_eq!(results["aims"].as_array().map(Vec::len), Some(27));
}
