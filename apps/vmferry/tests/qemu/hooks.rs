//! `--hook` on both sides, with real QEMUs.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use vmferry_qemu_lab::{Qemu, Version};

use crate::outlives::write_run_intent;
use crate::support::proxy::{Message, Proxy};
use crate::support::scene::{Scene, Way};
use crate::support::{BEFORE_COMMIT, Running, text};

/// A hook that notes its arguments and then runs `then`.
fn hook(scene: &Scene, name: &str, then: &str) -> (PathBuf, PathBuf) {
    let (source, program) = (scene.world.path("source"), scene.world.path(name));
    let log = scene.world.path(&format!("{name}.log"));
    let note = "$VMFERRY_SIDE $1 $VMFERRY_GUEST $VMFERRY_RESULT";
    let script = format!("#!/bin/sh\necho \"{note}\" >>'{}'\n{then}\n", log.display());
    std::fs::write(&source, script).unwrap();
    // Copied by another process, so that no forked child of this one has it open for writing.
    let copied = Command::new("install").args(["-m", "755"]).arg(source).arg(&program).status();
    assert!(copied.unwrap().success());
    (program, log)
}

fn lines(log: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    text.lines().map(|line| line.trim().to_owned()).collect()
}

#[test]
fn hook_runs_on_both_sides_before_and_after_the_handover() {
    for way in [Way::Attached, Way::Carried] {
        let mut scene = Scene::new(Version::V10_0, way);
        // QEMU must be alive when the hook runs: a manager would otherwise see it end first.
        let pid = scene.here.child.id();
        // A QEMU that has ended is a zombie until this test waits for it.
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
        // The receiver ends with its QEMU, after its hook.
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
fn hook_that_fails_before_the_handover_keeps_the_guest_at_the_source() {
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

/// The source's manager must be told that the guest stays, even though the process that ran the
/// hook was killed.
#[test]
fn guardian_runs_the_hook_when_the_guest_stays() {
    let mut scene = Scene::new(Version::V10_0, Way::Attached);
    let (program, log) = hook(&scene, "hook", "");
    let (_there, _receiving, address) = scene.receive_plain();
    let mut send = scene.send(&address, &["--plain", "--hook", text(&program)]);
    send.event_where(BEFORE_COMMIT[1].1);
    send.kill();
    scene.runs_on_here();
    assert_eq!(lines(&log), ["source after tested kept"]);
}

/// Waits until a hook has noted this line.
fn await_line(log: &Path, wanted: &str) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !lines(log).iter().any(|line| line == wanted) {
        assert!(Instant::now() < deadline, "no `{wanted}`: {:?}", lines(log));
        // A write to a file notifies no reader.
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A hook whose `before` does not end, and whose `after` notes whether `before` is still running.
fn endless(scene: &Scene, name: &str) -> (PathBuf, PathBuf) {
    let pid = scene.world.path(&format!("{name}.pid"));
    let (pid, log) = (pid.display(), scene.world.path(&format!("{name}.log")));
    let before = format!("echo $$ >'{pid}'; echo begun >>'{}'; exec sleep 1000", log.display());
    let after = format!("kill -0 $(cat '{pid}') && echo together >>'{}'", log.display());
    hook(scene, name, &format!("case $1 in before) {before} ;; *) {after} ;; esac\ntrue"))
}

#[test]
fn hook_running_at_a_cancellation_ends_before_the_next_hook() {
    for way in [Way::Attached, Way::Carried] {
        let mut scene = Scene::new(Version::V10_0, way);
        let (program, log) = endless(&scene, "endless");
        let (_there, _receiving, address) = scene.receive_plain();
        let send = scene.send(&address, &["--plain", "--hook", text(&program)]);
        await_line(&log, "begun");
        send.signal(Signal::INT);
        let sent = send.finish();
        sent.failed(11, "cancelled");
        assert_eq!(lines(&log), ["source before tested", "begun", "source after tested kept"]);
        scene.runs_on_here();
    }
}

#[test]
fn hook_of_a_killed_sender_ends_before_the_guardians_hook() {
    let mut scene = Scene::new(Version::V10_0, Way::Attached);
    let (program, log) = endless(&scene, "endless");
    let (_there, _receiving, address) = scene.receive_plain();
    let mut send = scene.send(&address, &["--plain", "--hook", text(&program)]);
    await_line(&log, "begun");
    send.kill();
    scene.runs_on_here();
    assert_eq!(lines(&log), ["source before tested", "begun", "source after tested kept"]);
}

#[test]
fn destination_hook_ends_before_the_source_gives_up() {
    let mut scene = Scene::new(Version::V10_0, Way::Attached);
    let (program, log) = endless(&scene, "endless");
    let listen = ["--listen", "tcp:127.0.0.1:0", "--plain", "--hook", text(&program)];
    let (_there, receiving, address) = scene.receive(&listen);
    let sent = scene.send(&address, &["--plain"]).finish();
    receiving.finish().failed(1, "endless did not finish within 20 s");
    assert!(!sent.last()["error"]["message"].as_str().unwrap().contains("30"), "{sent:?}");
    let told = ["destination before tested", "begun", "destination after tested kept"];
    assert_eq!(lines(&log), told);
    scene.runs_on_here();
}

#[test]
fn next_receiver_runs_the_hook_of_a_guest_that_never_arrived() {
    let mut scene = Scene::new(Version::V10_0, Way::Attached);
    let (program, log) = endless(&scene, "endless");
    let listen = ["--listen", "tcp:127.0.0.1:0", "--plain", "--hook", text(&program)];
    let (_there, mut receiving, address) = scene.receive(&listen);
    let send = scene.send(&address, &["--plain", "--reconnect-timeout", "1s"]);
    await_line(&log, "begun");
    receiving.kill();
    await_line(&log, "destination after tested kept");
    let told = ["destination before tested", "begun", "destination after tested kept"];
    assert_eq!(lines(&log), told);
    assert_ne!(send.finish().code, Some(0));
    scene.runs_on_here();
}

/// A migration whose COMMIT is delayed on its way to a receiver with a hook.
fn held_at_commit(scene: &mut Scene, program: &Path) -> (Qemu, Running, Running, Proxy) {
    let listen = ["--listen", "tcp:127.0.0.1:0", "--plain", "--hook", text(program)];
    let (there, receiving, address) = scene.receive(&listen);
    let proxy = Proxy::holding(&address, "127.0.0.1", Some(Message::Commit));
    let send = scene.send(&proxy.address, &["--plain"]);
    proxy.await_held();
    (there, receiving, send, proxy)
}

fn restarted(scene: &Scene, there: &Qemu, proxy: &Proxy, program: &Path) -> Running {
    let (address, hook) = (proxy.target(), ["--hook", text(program)]);
    let listen = ["--qemu", text(&there.qmp), "--once", "--listen", &address, "--plain"];
    scene.b.receive(&[&listen[..], &hook[..]].concat()).0
}

#[test]
fn next_receiver_runs_the_hook_of_a_guest_that_arrived() {
    let mut scene = Scene::new(Version::V10_0, Way::Attached);
    let (program, log) = hook(&scene, "hook", "");
    let (mut there, mut receiving, send, proxy) = held_at_commit(&mut scene, &program);
    receiving.kill();
    write_run_intent(&scene);
    let mut next = restarted(&scene, &there, &proxy, &program);
    assert_eq!(next.event("found")["continued"], true);
    await_line(&log, "destination after tested moved");
    proxy.lose();
    send.finish().exited(0);
    there.check_guest();
    assert_eq!(lines(&log), ["destination before tested", "destination after tested moved"]);
}

#[test]
fn next_receiver_runs_the_hook_of_a_guest_that_stayed() {
    let mut scene = Scene::new(Version::V10_0, Way::Attached);
    let (program, log) = hook(&scene, "hook", "");
    let (there, mut receiving, send, proxy) = held_at_commit(&mut scene, &program);
    receiving.kill();
    let next = restarted(&scene, &there, &proxy, &program);
    await_line(&log, "destination after tested kept");
    proxy.lose();
    assert_ne!(send.finish().code, Some(0));
    scene.runs_on_here();
    next.signal(Signal::TERM);
    next.finish();
    assert_eq!(lines(&log), ["destination before tested", "destination after tested kept"]);
}
