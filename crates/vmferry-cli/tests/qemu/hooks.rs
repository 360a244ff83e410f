//! `--hook` on both sides, with real QEMUs.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::scene::{Scene, Way};
use crate::support::{BEFORE_COMMIT, text};
use vmferry_qemu_lab::Version;

/// A hook that notes what it is told, and then does this.
fn hook(scene: &Scene, name: &str, then: &str) -> (PathBuf, PathBuf) {
    let (source, program) = (scene.world.path("source"), scene.world.path(name));
    let log = scene.world.path(&format!("{name}.log"));
    let note = "$VMFERRY_SIDE $1 $VMFERRY_GUEST $VMFERRY_RESULT";
    let script = format!("#!/bin/sh\necho \"{note}\" >>'{}'\n{then}\n", log.display());
    std::fs::write(&source, script).unwrap();
    // Copied by another process: nobody who forks meanwhile has it open for writing.
    let copied = Command::new("install").args(["-m", "755"]).arg(source).arg(&program).status();
    assert!(copied.unwrap().success());
    (program, log)
}

fn lines(log: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    text.lines().map(|line| line.trim().to_owned()).collect()
}

#[test]
fn a_hook_runs_on_both_sides_before_the_handover_and_when_it_is_decided() {
    for way in [Way::Attached, Way::Carried] {
        let mut scene = Scene::new(Version::V10_0, way);
        // QEMU must live when it is told that its guest has gone: a manager would see it end first.
        let pid = scene.here.child.id();
        // One that has ended is a zombie until this test waits for it.
        let lives = format!("grep -q '^State:.[^ZX]' /proc/{pid}/status");
        let check = format!("[ $VMFERRY_SIDE = destination ] || {lives} || exit 9");
        let (program, log) = hook(&scene, "hook", &check);
        let listen = ["--listen", "tcp:127.0.0.1:0", "--plain", "--hook", text(&program)];
        let (mut there, mut receiving, address) = scene.receive(&listen);
        let sent = scene.send(&address, &["--plain", "--hook", text(&program)]).finish();
        assert_eq!(sent.code, Some(0), "{way:?}: {sent:?}");
        assert!(!sent.lines.iter().any(|event| event["event"] == "hook-failed"), "{sent:?}");
        receiving.event("received");
        there.check_guest();
        there.child.kill().unwrap();
        // Its receiver ends with it, after its hook.
        receiving.finish();
        let mut told = lines(&log);
        let before = told.drain(..2).collect::<Vec<_>>();
        told.sort();
        assert_eq!(told, ["destination after tested moved", "source after tested moved"]);
        for side in ["source", "destination"] {
            assert!(before.contains(&format!("{side} before tested")), "{way:?}: {before:?}");
        }
    }
}

#[test]
fn a_hook_that_fails_before_the_handover_leaves_the_guest_at_the_source() {
    for way in [Way::Attached, Way::Carried] {
        let mut scene = Scene::new(Version::V10_0, way);
        let (program, log) = hook(&scene, "refuses", "[ $1 = after ]");
        let (_there, receiving, address) = scene.receive_plain();
        let sent = scene.send(&address, &["--plain", "--hook", text(&program)]).finish();
        sent.failed(11, "refuses failed");
        scene.runs_on_here();
        assert_eq!(lines(&log), ["source before tested", "source after tested kept"]);
        drop(receiving);

        let listen = ["--listen", "tcp:127.0.0.1:0", "--plain", "--hook", text(&program)];
        let (_there, receiving, address) = scene.receive(&listen);
        let sent = scene.send(&address, &["--plain"]).finish();
        assert_ne!(sent.code, Some(0), "{sent:?}");
        receiving.finish().failed(1, "refuses failed");
        scene.runs_on_here();
        let told = lines(&log);
        assert_eq!(told[2..], ["destination before tested", "destination after tested kept"]);
        scene.arrives();
    }
}

/// What the source's manager was told must be taken back, though the process that told it was
/// killed.
#[test]
fn a_hook_is_told_by_the_guardian_that_the_guest_has_stayed() {
    let mut scene = Scene::new(Version::V10_0, Way::Attached);
    let (program, log) = hook(&scene, "hook", "");
    let (_there, _receiving, address) = scene.receive_plain();
    let mut send = scene.send(&address, &["--plain", "--hook", text(&program)]);
    send.event_where(BEFORE_COMMIT[1].1);
    send.kill();
    scene.runs_on_here();
    assert_eq!(lines(&log), ["source after tested kept"]);
}
