//! The benchmarks work, and print what they promise. What they measure here means nothing.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use serde_json::Value;

/// Needs the `vmferry` command beside it, which the workspace's tests build.
#[test]
#[ignore = "takes its time: `make test-all` runs it"]
fn qemu_prints_one_object_of_the_promised_shape() {
    let output = Command::new(env!("CARGO_BIN_EXE_vmferry-bench"))
        .args(["qemu", "--json", "--quick"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(result["name"], "qemu");
    let rows = result["rows"].as_array().unwrap();
    assert_eq!(
        rows.len(),
        7,
        "three ways of QEMU's own and two of vmferry's, and one each with TLS"
    );
    for row in rows {
        for key in ["total_ms", "downtime_ms", "sent_mb", "cpu_s"] {
            assert!(row[key].as_f64() > Some(0.0), "{key}: {row}");
        }
    }
    for ratio in ["total_idle", "downtime_idle", "cpu_idle", "total_idle_tls"] {
        assert!(result["ratios"][ratio].as_f64() > Some(0.0), "{ratio}");
    }
}

/// Needs the `vmferry` command beside it, as well.
#[test]
#[ignore = "takes its time: `make test-all` runs it"]
fn carried_prints_one_object_of_the_promised_shape() {
    let output = Command::new(env!("CARGO_BIN_EXE_vmferry-bench"))
        .args(["carried", "--json", "--quick"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(result["name"], "carried");
    let rows = result["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 24, "two links, three guests, two ways of QEMU's and two of vmferry's");
    let sent = |link: &str, guest: &str, way: &str| {
        let wanted = |row: &&Value| {
            row["link"] == link
                && row["guest"] == guest
                && row["way"].as_str().is_some_and(|name| name.starts_with(way))
        };
        rows.iter().find(wanted).and_then(|row| row["sent_mb"].as_f64()).unwrap()
    };
    // Whatever the times are on a busy machine, a slow link has compressors work.
    let (theirs, ours) = (sent("capped", "program", "QEMU"), sent("capped", "program", "carried"));
    assert!(ours < 0.8 * theirs, "{ours} of {theirs}");
    for row in rows {
        for key in ["total_ms", "downtime_ms", "sent_mb", "cpu_s"] {
            assert!(row[key].as_f64() > Some(0.0), "{key}: {row}");
        }
    }
    for ratio in ["total_uncapped", "total_capped", "cpu_uncapped", "carried_of_raw_rustls"] {
        assert!(result["ratios"][ratio].as_f64() > Some(0.0), "{ratio}");
    }
    for guest in ["program", "hot", "hot_random"] {
        for figure in ["total_uncapped", "total_capped", "cpu_uncapped", "downtime_capped"] {
            let ratio = format!("{figure}_{guest}");
            assert!(result["ratios"][&ratio].as_f64() > Some(0.0), "{ratio}");
        }
    }
    assert_eq!(result["aims"].as_array().map(Vec::len), Some(3));
}

#[test]
#[ignore = "takes its time: `make test-all` runs it"]
fn place_prints_one_object_of_the_promised_shape() {
    let output = Command::new(env!("CARGO_BIN_EXE_vmferry-bench"))
        .args(["place", "--json", "--quick"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(result["rows"].as_array().is_some_and(|rows| rows.len() >= 8), "{result}");
    assert!(result["ratios"]["vmferry_of_store_2_threads"].as_f64() > Some(0.0), "{result}");
}

#[test]
fn engine_prints_one_object_of_the_promised_shape() {
    let output = Command::new(env!("CARGO_BIN_EXE_vmferry-bench"))
        .args(["engine", "--json", "--quick"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(result["name"], "engine");
    for key in ["cpu", "kernel", "kvm"] {
        assert!(result["machine"][key].is_string(), "{key}");
    }
    assert!(result["machine"]["cores"].as_u64() > Some(0));
    let rows = result["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 18, "six ways, at 1, 2 and 4 channels");
    for row in rows {
        for key in ["pages_per_s", "mb_per_s", "total_ms", "cpu_s"] {
            assert!(row[key].as_f64() > Some(0.0), "{key}: {row}");
        }
    }
    assert!(result["yardsticks"].as_object().is_some_and(|limits| limits.len() == 7));
    for ratio in ["plain_of_raw_socket", "tls_of_raw_rustls"] {
        assert!(result["ratios"][ratio].as_f64() > Some(0.0), "{ratio}");
    }
}

/// Needs KVM: the guest of threads has no balloon.
#[test]
#[ignore = "takes its time: `make test-all` runs it"]
fn free_pages_prints_one_object_of_the_promised_shape() {
    vmferry_kit::need_kvm();
    let output = Command::new(env!("CARGO_BIN_EXE_vmferry-bench"))
        .args(["free-pages", "--json", "--quick"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(result["name"], "free-pages");
    let rows = result["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4, "an idle and a busy guest, without hints and with them");
    for row in rows {
        for key in ["total_ms", "sent_mb", "nonfree_mb", "source_cpu_s"] {
            assert!(row[key].as_f64() > Some(0.0), "{key}: {row}");
        }
        assert_eq!(row["hinted_mb"].as_f64() > Some(0.0), row["hints"] == "yes", "{row}");
    }
    for ratio in ["idle_8g_reduction", "busy_8g_reduction", "sent_over_nonfree", "guest_work_ratio"]
    {
        assert!(result["ratios"][ratio].is_number(), "{ratio}");
    }
}

#[test]
#[ignore = "takes its time: `make test-all` runs it"]
fn socket_prints_one_object_of_the_promised_shape() {
    let output = Command::new(env!("CARGO_BIN_EXE_vmferry-bench"))
        .args(["socket", "--json", "--quick"])
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(result["name"], "socket");
    assert!(result["machine"]["tcp"].as_str().is_some_and(|name| !name.is_empty()), "{result}");
    let places: &[&str] = match told.contains("no network namespaces") {
        true => &["loopback"],
        false => &["loopback", "namespaces"],
    };
    let rows = result["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 26 * places.len(), "20 ways that do not encrypt and 6 that do");
    for row in rows {
        // What the kernel has not is said, and is no failure.
        if row["note"].as_str().is_some_and(|note| note.starts_with("not here")) {
            assert!(row["mb_per_s"].is_null(), "{row}");
            continue;
        }
        for key in ["mb_per_s", "total_ms", "cpu_s_per_gib", "speed_of_first", "frames_out"] {
            assert!(row[key].as_f64() > Some(0.0), "{key}: {row}");
        }
    }
    for place in places {
        assert!(result["yardsticks"][format!("raw_socket_{place}_mb_per_s")].is_number());
        let ratio = &result["ratios"][format!("writev_of_raw_socket_{place}")];
        assert!(ratio.as_f64() > Some(0.0), "{result}");
        let row = |row: &&Value| row["place"] == *place;
        let there = result["places"].as_array().unwrap().iter().find(row);
        assert!(there.is_some_and(|there| there["congestion_control"].is_string()), "{result}");
    }
}

/// Runs a benchmark and draws its plots.
fn with_plots(name: &str) -> Value {
    let directory = tempfile::tempdir().unwrap();
    let svg = directory.path().join("plots.svg");
    let output = Command::new(env!("CARGO_BIN_EXE_vmferry-bench"))
        .args([name, "--json", "--quick", "--svg"])
        .arg(&svg)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(std::fs::read_to_string(&svg).unwrap().contains("<polyline"), "lines are drawn");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn bitmap_prints_one_object_of_the_promised_shape() {
    let result = with_plots("bitmap");
    assert_eq!(result["name"], "bitmap");
    for row in result["rows"].as_array().unwrap() {
        assert!(row["us"].as_f64() > Some(0.0), "{row}");
    }
    let migrations = result["migrations"].as_array().unwrap();
    assert_eq!(migrations.len(), 2, "a guest that reads and one that writes");
    for row in migrations {
        assert!(row["calls"].as_u64() > Some(0) && row["byte_ms"].as_f64() > Some(0.0), "{row}");
    }
    for case in ["clean", "1pct_clustered", "1pct_scattered"] {
        for ratio in [format!("byte_over_best_{case}"), format!("word_over_best_{case}")] {
            assert!(result["ratios"][&ratio].as_f64() > Some(0.0), "{ratio}");
        }
    }
    assert!(result["ratios"]["flat_simd_of_memory_bandwidth_1tib"].is_number(), "{result}");
}

#[test]
#[ignore = "takes its time: `make test-all` runs it"]
fn dirty_log_prints_one_object_of_the_promised_shape() {
    let result = with_plots("dirty-log");
    assert_eq!(result["name"], "dirty-log");
    let rows = result["rows"].as_array().unwrap();
    for log in ["get.org", "get.opt", "switch", "AtomicBitmap", "userfaultfd"] {
        for table in ["gui", "live", "density"] {
            assert!(rows.iter().any(|row| row["log"] == log && row["table"] == table), "{log}");
        }
    }
    for ratio in [
        "get_org_over_switch_clean_4g",
        "get_opt_over_switch_1pct_4g",
        "switch_clean_4g_over_32k",
        "atomic_bitmap_over_switch_1pct_4g",
        "atomic_bitmap_over_switch_1pct_scattered_4g",
        "atomic_bitmap_over_switch_clean_4g",
        "mark_over_fetch_or",
    ] {
        assert!(result["ratios"][ratio].as_f64() > Some(0.0), "{ratio}");
    }
}

#[test]
fn compression_prints_one_object_of_the_promised_shape() {
    let result = with_plots("compression");
    assert_eq!(result["name"], "compression");
    let rows = result["rows"].as_array().unwrap();
    for way in ["raw", "zlib per call", "zlib pipeline", "lz4", "zstd:1", "zstd:3", "auto"] {
        assert!(rows.iter().any(|row| row["way"] == way), "{way}");
    }
    for row in rows {
        for key in ["pages_per_s", "wire_mb_per_s", "ratio", "source_cpu_s_per_gib"] {
            assert!(row[key].as_f64() > Some(0.0), "{key}: {row}");
        }
    }
    for row in result["profile"].as_array().unwrap() {
        let allocates = row["allocations_per_page"].as_f64() >= Some(1.0);
        assert_eq!(allocates, row["way"] == "zlib per call", "{row}");
    }
    for ratio in [
        "pipeline_over_percall_zlib",
        "auto_over_percall_zlib_uncapped",
        "auto_of_link_limit_350mbit",
        "auto_of_link_limit_350mbit_program",
        "auto_over_raw_uncapped",
        "auto_worst_over_best_fixed",
        "delta_over_best_nodelta_hot",
        "migration_thread_cpu_share",
    ] {
        assert!(result["ratios"][ratio].as_f64() > Some(0.0), "{ratio}");
    }
    assert!(result["ratios"]["allocations_per_page"].as_f64() < Some(1.0), "{result}");
    let outcomes = result["converge"].as_array().unwrap();
    let outcome = |way: &str| &outcomes.iter().find(|row| row["way"] == way).unwrap()["outcome"];
    assert_eq!(outcome("none"), "refused");
    assert_eq!(outcome("auto"), "handed over");
    assert!(result["codecs"].as_array().is_some_and(|codecs| codecs.len() >= 8), "{result}");
}

#[test]
#[ignore = "takes its time: `make test-all` runs it"]
fn transport_prints_one_object_of_the_promised_shape() {
    let output = Command::new(env!("CARGO_BIN_EXE_vmferry-bench"))
        .args(["transport", "--json", "--quick"])
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(result["name"], "transport");
    let rows = result["rows"].as_array().unwrap();
    let places: &[&str] = match told.contains("no network namespaces") {
        true => &["loopback"],
        false => &["namespaces", "loopback"],
    };
    // What was not compiled in is said.
    let is_there = |way: &str| !told.contains(&format!("transport: {way} is not in this program"));
    for place in places {
        let row = |link, way| {
            let wanted =
                |row: &&Value| row["place"] == *place && row["link"] == link && row["way"] == way;
            rows.iter().find(wanted).unwrap_or_else(|| panic!("{place}, {link}, {way}"))
        };
        for way in ["raw socket", "raw rustls"] {
            row("uncapped", way);
        }
        for way in ["tcp", "tls", "grpc", "grpc-ack"].into_iter().filter(|way| is_there(way)) {
            row("uncapped", way);
            let capped = row("capped", way)["mb_per_s"].as_f64().unwrap();
            let cap = result["yardsticks"]["cap_mb_per_s"].as_f64().unwrap();
            assert!(capped < 1.1 * cap, "{way} goes beyond the cap: {capped}");
        }
        assert!(result["yardsticks"][format!("raw_rustls_2ch_{place}_mb_per_s")].is_number());
    }
    assert!(rows.iter().any(|row| row["way"] == "unix"));
    for row in rows {
        for key in ["total_ms", "mb_per_s", "source_cpu_s_per_gb", "destination_cpu_s_per_gb"] {
            assert!(row[key].as_f64() > Some(0.0), "{key}: {row}");
        }
        let idle = |key: &str| row[format!("idle_cpu_percent_{key}")].as_f64().unwrap();
        assert!(idle("min") <= idle("mean") && idle("mean") <= idle("max"), "{row}");
    }
    let mut ratios = vec![
        "plain_of_raw_socket",
        "plain_of_raw_socket_2ch_loopback",
        "tls_of_raw_rustls",
        "tls_over_plain_capped",
        "tls_cpu_over_plain",
        "under_attack_over_quiet",
    ];
    if is_there("grpc") {
        ratios.extend([
            "grpc_streamed_over_plain_capped",
            "grpc_streamed_over_acknowledged_uncapped",
        ]);
    }
    for ratio in ratios {
        assert!(result["ratios"][ratio].as_f64() > Some(0.0), "{ratio}");
    }
    assert_eq!(result["published"][1]["published_s"], 44.0);
    let attacked = &result["under_attack"][1];
    assert!(attacked["failed_handshakes"].as_f64() > Some(0.0), "{attacked}");
}

#[test]
fn an_interrupted_benchmark_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_vmferry-bench"))
        .args(["transport", "--quick"])
        .env("TMPDIR", directory.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut told = BufReader::new(child.stderr.take().unwrap()).lines();
    let begun = told.find(|line| line.as_ref().is_ok_and(|line| line.contains("pass 1")));
    assert!(begun.is_some(), "it has begun");
    let children = || {
        let path = format!("/proc/{0}/task/{0}/children", child.id());
        std::fs::read_to_string(path).unwrap()
    };
    let sides: Vec<u32> =
        children().split_whitespace().map(|number| number.parse().unwrap()).collect();
    assert_eq!(sides.len(), 3, "source, destination and attacker");
    let number = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(number, rustix::process::Signal::INT).unwrap();
    let rest: Vec<String> = told.map_while(Result::ok).collect();
    assert!(!child.wait().unwrap().success());
    assert!(rest.iter().any(|line| line.contains("interrupted")), "{rest:?}");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "no files are left");
    for side in sides {
        let command = std::fs::read(format!("/proc/{side}/cmdline")).unwrap_or_default();
        assert!(!String::from_utf8_lossy(&command).contains("transport"), "{side} still runs");
    }
}

/// Needs the `vmferry` command beside it, as well.
#[test]
fn an_interrupted_benchmark_of_qemus_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_vmferry-bench"))
        .args(["qemu", "--quick"])
        .env("TMPDIR", directory.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let command_of = |process: &str| {
        let bytes = std::fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let path = format!("/proc/{0}/task/{0}/children", child.id());
    let qemus = loop {
        assert_eq!(child.try_wait().unwrap(), None, "it has begun");
        let children = std::fs::read_to_string(&path).unwrap_or_default();
        let qemus = children.split_whitespace().filter(|it| command_of(it).contains("qemu-system"));
        let qemus: Vec<(String, String)> =
            qemus.map(|it| (it.to_owned(), command_of(it))).collect();
        if qemus.len() > 1 {
            break qemus;
        }
        // Nobody tells of processes that are started.
        std::thread::sleep(std::time::Duration::from_millis(10));
    };
    let number = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(number, rustix::process::Signal::TERM).unwrap();
    let output = child.wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && told.contains("interrupted"), "{told}");
    assert!(!told.contains("panicked"), "{told}");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "no files are left");
    let mut memory = Vec::new();
    for (process, command) in &qemus {
        assert_ne!(command_of(process), *command, "{process} still runs");
        memory.extend(command.split([',', '=', '\0']).filter(|word| word.starts_with("/dev/shm/")));
    }
    assert!(!memory.is_empty(), "guests whose memory is in files: {qemus:?}");
    let left: Vec<_> = memory.iter().filter(|file| std::path::Path::new(file).exists()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn only_compression_has_a_full_size() {
    let output = Command::new(env!("CARGO_BIN_EXE_vmferry-bench"))
        .args(["place", "--quick", "--full"])
        .output()
        .unwrap();
    assert!(!output.status.success());
    let output = Command::new(env!("CARGO_BIN_EXE_vmferry-bench"))
        .args(["place", "--full"])
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("full size"));
}
