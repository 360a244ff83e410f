//! Real programs as hooks.

use std::path::Path;

use super::*;

fn hook(directory: &Path, script: &str, timeout: Duration) -> Hook {
    let (text, program) = (directory.join("text"), directory.join("hook"));
    std::fs::write(&text, format!("#!/bin/sh\n{script}\n")).unwrap();
    // Copied by another process, so that no forked child of this test has it open for writing
    // (ETXTBSY).
    let copied = Command::new("install").args(["-m", "755"]).arg(text).arg(&program).status();
    assert!(copied.unwrap().success());
    Hook { program, timeout }
}

fn call() -> Call {
    Call {
        phase: Phase::After,
        side: Side::Source,
        guest: GuestIdentity { uuid: uuid::Uuid::from_u128(7), name: "web; rm -rf /".into() },
        session: Some("12".into()),
        peer: None,
        result: Some(Outcome::Moved),
    }
}

const LONG: Duration = Duration::from_secs(60);

#[test]
fn run_passes_the_call_without_a_shell() {
    let directory = tempfile::tempdir().unwrap();
    let told = directory.path().join("told");
    let script = format!(
        "echo \"$1|$VMFERRY_HOOK|$VMFERRY_SIDE|$VMFERRY_GUEST|$VMFERRY_UUID|\
         $VMFERRY_SESSION|$VMFERRY_PEER|$VMFERRY_RESULT\" >{}",
        told.display()
    );
    hook(directory.path(), &script, LONG).run(&call()).unwrap();
    let uuid = uuid::Uuid::from_u128(7);
    let expected = format!("after|after|source|web; rm -rf /|{uuid}|12||moved\n");
    assert_eq!(std::fs::read_to_string(told).unwrap(), expected);
}

#[test]
fn run_reports_failure_timeout_and_a_missing_program() {
    let directory = tempfile::tempdir().unwrap();
    let error = hook(directory.path(), "exit 3", LONG).run(&call()).unwrap_err();
    assert!(error.to_string().contains("exit status: 3"), "{error}");
    // A timeout also kills the processes that the hook has started.
    let started = directory.path().join("started");
    let script = format!("sleep 1000 & echo $! >{}; wait", started.display());
    let slow = hook(directory.path(), &script, Duration::from_millis(300));
    assert!(matches!(slow.run(&call()), Err(HookError::TimedOut { .. })));
    if let Ok(pid) = std::fs::read_to_string(&started) {
        let deadline = Instant::now() + LONG;
        let process = format!("/proc/{}/cmdline", pid.trim());
        // Empty for a zombie.
        while std::fs::read(&process).is_ok_and(|line| !line.is_empty()) {
            assert!(Instant::now() < deadline, "a process of the hook still runs");
            std::thread::yield_now();
        }
    }
    let gone = Hook { program: "/nowhere/hook".into(), timeout: LONG };
    assert!(matches!(gone.run(&call()), Err(HookError::Run { .. })));
}
