//! The benchmarks work, and print what they promise. What they measure here means nothing.

use std::process::Command;

use serde_json::Value;

/// Needs the `vmferry` command beside it, which the workspace's tests build.
#[test]
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

#[test]
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
    assert_eq!(rows.len(), 12, "four ways, at 1, 2 and 4 channels");
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
