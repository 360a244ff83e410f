//! Each benchmark runs with `--quick` and prints the documented JSON. The numbers themselves mean
//! nothing here.

mod engine;
mod interrupted;
mod libvirt;
mod memory;
mod qemu;
mod transport;

use std::process::{Command, Output};

use serde_json::Value;

/// The benchmark command with these arguments.
fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vmferry-bench"));
    command.args(arguments);
    command
}

/// Runs a benchmark with `--json --quick`. Returns its results and its messages.
fn run_with_messages(name: &str) -> (Value, String) {
    results(name, &command(&[name, "--json", "--quick"]).output().unwrap())
}

/// Runs a benchmark with `--json --quick`.
fn run(name: &str) -> Value {
    run_with_messages(name).0
}

/// Runs a benchmark that has plots, and checks that it draws lines.
fn run_with_plots(name: &str) -> Value {
    let directory = tempfile::tempdir().unwrap();
    let svg = directory.path().join("plots.svg");
    let output = command(&[name, "--json", "--quick", "--svg"]).arg(&svg).output().unwrap();
    assert!(std::fs::read_to_string(&svg).unwrap().contains("<polyline"), "there are no lines");
    results(name, &output).0
}

fn results(name: &str, output: &Output) -> (Value, String) {
    let messages = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{messages}");
    let results: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(results["name"], name);
    (results, messages)
}

/// Asserts that these numbers of a row are positive.
fn assert_positive(row: &Value, keys: &[&str]) {
    for key in keys {
        assert!(row[key].as_f64() > Some(0.0), "{key}: {row}");
    }
}

/// Asserts that the results have these ratios, and that they are positive.
fn assert_ratios(results: &Value, names: &[&str]) {
    for name in names {
        assert!(results["ratios"][name].as_f64() > Some(0.0), "{name}");
    }
}

fn rows(results: &Value) -> &Vec<Value> {
    results["rows"].as_array().unwrap()
}

#[test]
fn full_is_rejected_except_for_compression() {
    let output = command(&["place", "--quick", "--full"]).output().unwrap();
    assert!(!output.status.success());
    let output = command(&["place", "--full"]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("full size"));
}
