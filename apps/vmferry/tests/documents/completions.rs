//! Shell completions, run by the shells.

use std::path::Path;
use std::process::Command;

use crate::vmferry;

/// Completes the last word with the function that the script registered.
const COMPLETE: &str = r#"
source "$1"; shift
[[ $(complete -p vmferry) =~ -F\ ([^ ]+) ]] || exit 9
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
"${BASH_REMATCH[1]}" vmferry "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\n' "${COMPREPLY[@]}"
"#;

/// What bash offers for the last word.
fn completed(script: &Path, words: &[&str]) -> Vec<String> {
    let mut bash = Command::new("bash");
    bash.args(["--noprofile", "--norc", "-c", COMPLETE, "bash"]).arg(script).args(words);
    let output = bash.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn completions_work_in_bash() {
    let directory = tempfile::tempdir().unwrap();
    let script = directory.path().join("vmferry");
    std::fs::write(&script, vmferry(&["completions", "bash"]).stdout).unwrap();
    let parsed = Command::new("bash").arg("-n").arg(&script).output().unwrap();
    assert!(parsed.status.success() && parsed.stderr.is_empty(), "{parsed:?}");
    assert_eq!(completed(&script, &["vmferry", "sen"]), ["send"]);
    let downtime = completed(&script, &["vmferry", "send", "web", "--down"]);
    assert_eq!(downtime, ["--downtime-limit", "--downtime-abort"]);
    assert_eq!(completed(&script, &["vmferry", "pki", "re"]), ["revoke"]);
    let ways = completed(&script, &["vmferry", "send", "--when-stuck", ""]);
    assert_eq!(ways, ["refuse", "switch-over", "post-copy"]);
    assert!(!completed(&script, &["vmferry", ""]).contains(&"guard".to_owned()));
}

/// Other shells parse their completion scripts.
#[test]
fn completions_parse_in_other_shells() {
    let directory = tempfile::tempdir().unwrap();
    for shell in ["zsh", "fish"] {
        let script = directory.path().join(shell);
        std::fs::write(&script, vmferry(&["completions", shell]).stdout).unwrap();
        let parsed = Command::new(shell).arg("-n").arg(&script).output();
        let parsed = parsed.unwrap_or_else(|error| panic!("this test needs {shell}: {error}"));
        assert!(parsed.status.success() && parsed.stderr.is_empty(), "{parsed:?}");
    }
}

#[test]
fn completions_refuse_an_unknown_shell() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vmferry"));
    let output = command.args(["completions", "tcsh"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("bash"), "{output:?}");
}
