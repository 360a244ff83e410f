//! The systemd unit of `vmferry receive`, checked by systemd itself. Nothing is installed or
//! started.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Accepted exposure, in tenths. It comes from the network, users and `/dev/kvm`.
const MAX_EXPOSURE_TENTHS: &str = "20";

fn unit() -> String {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist/systemd/vmferry-receive.service");
    std::fs::read_to_string(path).unwrap()
}

/// The unit as it is installed, except for the path of the command.
fn installed(directory: &Path, text: &str) -> PathBuf {
    let path = directory.join("vmferry-receive.service");
    std::fs::write(&path, text.replace("/usr/local/bin/vmferry", env!("CARGO_BIN_EXE_vmferry")))
        .unwrap();
    path
}

/// Runs `systemd-analyze`.
fn analyze(arguments: &[&str], unit: &Path) -> Output {
    let output = Command::new("systemd-analyze").args(arguments).arg(unit).output();
    output.unwrap_or_else(|error| panic!("this test needs systemd-analyze: {error}"))
}

#[test]
fn unit_is_valid_for_systemd() {
    let directory = tempfile::tempdir().unwrap();
    let unit = unit();
    let good = analyze(&["verify"], &installed(directory.path(), &unit));
    let said = String::from_utf8_lossy(&good.stderr);
    // systemd also checks the system's own units that this one names.
    let about_ours: Vec<_> = said.lines().filter(|line| line.contains("vmferry")).collect();
    assert!(about_ours.is_empty(), "{said}");
    // A mistake would be reported.
    let wrong = unit.replace("NoNewPrivileges=yes", "NoNewPrivilege=yes");
    let wrong = analyze(&["verify"], &installed(directory.path(), &wrong));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("NoNewPrivilege"), "{wrong:?}");
}

#[test]
fn unit_has_little_exposure() {
    let directory = tempfile::tempdir().unwrap();
    let unit = unit();
    let threshold = format!("--threshold={MAX_EXPOSURE_TENTHS}");
    let arguments = ["security", "--offline=true", &threshold];
    let good = analyze(&arguments, &installed(directory.path(), &unit));
    let said = String::from_utf8_lossy(&good.stdout);
    assert!(good.status.success(), "{said}{}", String::from_utf8_lossy(&good.stderr));
    // Without the restrictions the exposure is higher.
    let open = unit.replace("CapabilityBoundingSet=\n", "").replace("ProtectSystem=strict\n", "");
    let open = analyze(&arguments, &installed(directory.path(), &open));
    assert!(!open.status.success());
}

/// This version accepts the command line. It fails because there are no certificates, in a
/// directory that has none on any host.
#[test]
fn unit_has_a_valid_command_line() {
    const TLS: &str = "/etc/vmferry/tls";
    let unit = unit();
    let line = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
    assert!(line.split_whitespace().any(|word| word == TLS), "{line}");
    let directory = tempfile::tempdir().unwrap();
    let none = directory.path().join("none").display().to_string();
    let words = line.split_whitespace().skip(1);
    let output = Command::new(env!("CARGO_BIN_EXE_vmferry"))
        .args(words.map(|word| if word == TLS { none.as_str() } else { word }))
        .env("VMFERRY_RUNTIME_DIR", directory.path().join("runtime"))
        .env_remove("VMFERRY_STATE_DIR")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(4), "{output:?}");
}
