//! Report pages of real migrations.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use vmferry_browser_lab::{Scheme, measure};

fn vmferry(arguments: &[&str], directory: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vmferry"))
        .args(arguments)
        .current_dir(directory)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn report_renders_a_real_migration() {
    let directory = tempfile::tempdir().unwrap();
    let here = directory.path();
    let demo = [
        "demo",
        "--json",
        "--guest",
        "process",
        "--memory",
        "64M",
        "--hot",
        "8M",
        "--transport",
        "unix",
    ];
    for (name, more) in
        [("one.json", &["--compress", "none"][..]), ("two.json", &["--max-bandwidth", "64M"])]
    {
        let output = vmferry(&[&demo, more].concat(), here);
        assert!(output.status.success(), "{}", text(&output.stderr));
        std::fs::write(here.join(name), output.stdout).unwrap();
    }
    let output = vmferry(&["report", "one.json", "--json"], here);
    assert!(output.status.success(), "{}", text(&output.stdout));
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    let page = std::fs::read_to_string(here.join("one.html")).unwrap();
    assert_eq!(said["output"], "one.html");
    assert_eq!(
        (said["kind"].as_str(), said["bytes"].as_u64()),
        (Some("run"), Some(page.len() as u64))
    );
    let measured = measure(&page, 1280, Scheme::Light);
    assert!(measured.headline.contains(" moved in "), "{}", measured.headline);
    assert!(measured.plots.len() >= 3 && measured.too_wide.is_empty(), "{measured:?}");
    let facts: Value = serde_json::from_str(&measured.facts).unwrap();
    let demo: Value =
        serde_json::from_slice(&std::fs::read(here.join("one.json")).unwrap()).unwrap();
    assert_eq!(facts["numbers"]["downtime_ms"], demo["downtime_ms"]);

    let output = vmferry(&["report", "--compare", "one.json", "two.json", "-o", "-"], here);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let measured = measure(text(&output.stdout), 1280, Scheme::Dark);
    assert!(measured.headline.starts_with("B has "), "{}", measured.headline);
    assert!(measured.plots.len() >= 6 && measured.too_wide.is_empty(), "{measured:?}");
}

#[test]
fn report_refuses_unusable_inputs_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let here = directory.path();
    let run = "{\"event\":\"ready\"}\n{\"event\":\"committed\"}\n";
    let bench = r#"{"name":"place","machine":{},"rows":[],"ratios":{}}"#;
    let files = [
        ("run.json", run),
        ("bench.json", bench),
        ("broken.json", "{\"event\":\"ready\"}\nno\n{}\n"),
        ("empty.json", ""),
        ("page.html", run),
    ];
    for (name, content) in files {
        std::fs::write(here.join(name), content).unwrap();
    }
    std::os::unix::fs::symlink("run.json", here.join("link.html")).unwrap();
    let cases: [(&[&str], i32, &str); 12] = [
        (&["broken.json"], 5, "broken.json, line 2: not JSON"),
        (&["empty.json"], 5, "empty.json is neither the record"),
        (&["missing.json"], 2, "missing.json can't be read"),
        (&["run.json", "-o", "run.json"], 2, "would overwrite run.json"),
        (&["run.json", "-o", "link.html"], 2, "would overwrite run.json"),
        (&["page.html"], 2, "would overwrite page.html"),
        (&["run.json", "run.json", "-o", "x.html"], 2, "--compare"),
        (&["run.json", "bench.json", "-o", "x.html"], 2, "not both: make two pages"),
        (&["--compare", "run.json", "-o", "x.html"], 2, "needs the records of two"),
        (&["bench.json", "bench.json"], 2, "add -o FILE"),
        (&["run.json", "-o", "none/x.html"], 1, "none/x.html can't be written"),
        (&["run.json", "--json", "-o", "-"], 2, "both use standard output"),
    ];
    for (arguments, status, message) in cases {
        let output = vmferry(&[&["report"], arguments].concat(), here);
        let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {said}");
        assert!(said.contains(message), "{arguments:?}: {said}");
    }
    assert_eq!(
        std::fs::read_to_string(here.join("run.json")).unwrap(),
        run,
        "inputs are as they were"
    );
    assert!(!here.join("x.html").exists());
    for (files, kind) in [(&["run.json"][..], "run"), (&["bench.json", "bench.json"], "benchmarks")]
    {
        let output = vmferry(&[&["report", "--json", "-o", "x.html"], files].concat(), here);
        let said: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(said["kind"], kind);
    }
}
