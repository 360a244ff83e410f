//! The receiver next to a QEMU is sandboxed too, and another process starts that QEMU.

use std::os::unix::process::ExitStatusExt;

use crate::support::inject::{Argument, call, call_and_leave};
use crate::support::scene::{Scene, Way};
use crate::support::stops::{Stopped, guardian};
use crate::support::{Running, in_parallel, text};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::json;
use vmferry_qemu::{Qmp, wait_for_end};
use vmferry_qemu_lab::Version;

use Argument::Number;

/// Opens a socket of this family in the process.
fn socket(pid: u32, family: i32) -> i64 {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    call(pid, libc::SYS_socket, &[Number(family as u64), Number(kind as u64), Number(0)])
}

/// The calls that are denied to a receiver next to a QEMU, though allowed to one that runs a guest.
fn can_t_reach_out(receiving: &Running) {
    let pid = receiving.child.id();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    for line in ["Seccomp:\t2\n", "NoNewPrivs:\t1\n", "CapEff:\t0000000000000000\n"] {
        assert!(status.contains(line), "{status}");
    }
    assert_eq!(socket(pid, libc::AF_INET), i64::from(-libc::ENOSYS));
    assert!(socket(pid, libc::AF_UNIX) >= 0);
    let machine = call(pid, libc::SYS_ioctl, &[Number(0), Number(0xae01), Number(0)]);
    assert_eq!(machine, i64::from(-libc::ENOSYS), "KVM_CREATE_VM");
}

#[test]
fn sandboxed_receiver_serves_a_waiting_qemu() {
    for way in [Way::Attached, Way::Carried] {
        let mut scene = Scene::new(Version::V10_0, way);
        let tls = scene.world.tls();
        let receive = ["--listen", "127.0.0.1:0", "--tls", &tls, "--sandbox", "auto"];
        let (mut there, mut receiving, address) = scene.receive(&receive);
        can_t_reach_out(&receiving);
        let sent = scene.send_tls(&address).finish();
        assert_eq!(sent.code, Some(0), "{way:?}: {sent:?}");
        receiving.event("received");
        there.check_guest();
    }
}

/// QEMU listens for several streams in a directory that was created before.
#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn sandboxed_receiver_passes_several_streams() {
    let mut scene = Scene::new(Version::V10_0, Way::Carried);
    let tls = scene.world.tls();
    let (mut there, mut receiving, address) =
        scene.receive(&["--listen", "127.0.0.1:0", "--tls", &tls]);
    scene.send(&address, &["--tls", &tls, "--multifd", "2"]).finish().exited(0);
    receiving.event("received");
    there.check_guest();
    drop(there);
    receiving.finish().exited(0);
}

/// An attempt that uses QEMU up makes the receiver need another QEMU, which it can't start itself.
#[test]
fn starter_starts_qemu_for_every_attempt() {
    for way in [Way::Attached, Way::Carried] {
        let mut scene = Scene::new(Version::V10_0, way);
        let tls = scene.world.tls();
        let command = scene.command("started");
        let (mut receiving, address) =
            scene.b.receive(&["--listen", "127.0.0.1:0", "--tls", &tls, "--exec", &command]);
        can_t_reach_out(&receiving);
        // Killed while QEMU takes streams, or before it has loaded the state.
        let mut send = scene.send_tls(&address);
        send.event_where(|event| event["event"] == "round-started" && event["paused"] == true);
        let guardian = guardian(&send);
        send.kill();
        let ends = ["link-lost", "attempt-failed"];
        receiving.event_where(|event| ends.iter().any(|end| event["event"] == *end));
        // On a busy machine the receiver may reach QEMU later than this test does. A QEMU that has
        // ended already can't be waited for.
        let _ = wait_for_end(guardian);
        scene.runs_on_here();
        let mut again = scene.send_tls(&address);
        again.event("committed");
        let received = receiving.event("received");
        assert_eq!(again.finish().code, Some(0), "{way:?}");
        let qmp = received["qmp"].as_str().unwrap();
        let mut monitor = Qmp::connect(qmp.as_ref()).unwrap();
        let status = monitor.execute("query-status", json!({})).unwrap();
        assert_eq!(status["status"], "running");
        monitor.quit().unwrap();
        let ended = receiving.finish();
        assert_eq!(ended.code, Some(0), "{way:?}: {ended:?}");
    }
}

#[test]
fn ending_exec_receiver_ends_a_qemu_without_a_guest() {
    let scene = Scene::new(Version::V10_0, Way::Attached);
    let tls = scene.world.tls();
    let command = scene.command("started");
    let (mut receiving, _) =
        scene.b.receive(&["--listen", "127.0.0.1:0", "--tls", &tls, "--exec", &command]);
    let marker = scene.world.path("marker");
    let words: [Vec<u8>; 2] = [b"touch\0".to_vec(), format!("{}\0", text(&marker)).into_bytes()];
    let words: Vec<&[u8]> = words.iter().map(Vec::as_slice).collect();
    let touch = [Argument::Bytes(b"/usr/bin/touch\0"), Argument::Strings(&words), Number(0)];
    call_and_leave(receiving.child.id(), libc::SYS_execve, &touch);
    let status = receiving.child.wait().unwrap();
    assert_eq!(status.signal(), Some(libc::SIGSYS), "{status}");
    assert!(!marker.exists());
    // The starter ends a QEMU without a guest. If it has not yet, the test ends it.
    let qmp = std::fs::read_dir(&scene.b.runtime).unwrap().flatten().map(|entry| entry.path());
    for socket in qmp.filter(|path| path.extension().is_some_and(|end| end == "qmp")) {
        if let Ok(mut monitor) = Qmp::connect(&socket) {
            // It may end before its answer is read.
            let _ = monitor.quit();
        }
    }
}

/// The only child of a process.
pub fn child(pid: u32) -> u32 {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    children.trim().parse().unwrap_or_else(|_| panic!("{pid} has these children: {children}"))
}

/// A stopped QEMU is reported, both the first one and the next one, whose process the receiver
/// can't see itself.
#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn started_qemu_that_is_stopped_is_named() {
    in_parallel(vec![Way::Carried, Way::Attached], |way| {
        let mut scene = Scene::new(Version::V10_0, way);
        let tls = scene.world.tls();
        let command = scene.command("started");
        let (mut receiving, address) =
            scene.b.receive(&["--listen", "127.0.0.1:0", "--tls", &tls, "--exec", &command]);
        let mut before = 0;
        for _ in 0..2 {
            let mut send = scene.send_tls(&address);
            send.event("round-started");
            let qemu = child(child(receiving.child.id()));
            assert_ne!(qemu, before, "the one before was used up");
            before = qemu;
            let _stopped = Stopped::now(qemu);
            // The receiver reports the causes. The source's error says what failed and does not
            // blame the link.
            send.finish().failed(1, "the VMM could not load the guest's state");
            let failed = receiving.event("attempt-failed");
            let why = failed["reason"].as_str().unwrap();
            let cure = format!("`kill -CONT {qemu}`");
            let stopped =
                ["is stopped", "has been stopped"].iter().any(|words| why.contains(words));
            assert!(stopped && why.contains(&cure), "{way:?}: {failed}");
            scene.runs_on_here();
        }
    });
}

/// The started program may be a script that does more than run QEMU.
#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn started_qemu_with_a_guest_outlives_a_terminated_receiver() {
    let scene = Scene::new(Version::V10_0, Way::Carried);
    let tls = scene.world.tls();
    let pid_file = scene.world.path("pid");
    let command = format!(
        "sh -c 'echo $$ >\"$0\"; \"$@\"; exec sleep 1000' '{}' {}",
        text(&pid_file),
        scene.command("started")
    );
    let (mut receiving, address) =
        scene.b.receive(&["--listen", "127.0.0.1:0", "--tls", &tls, "--exec", &command]);
    scene.send_tls(&address).finish().exited(0);
    receiving.event("received");
    receiving.signal(Signal::TERM);
    let ended = receiving.finish();
    let pid: i32 = std::fs::read_to_string(&pid_file).unwrap().trim().parse().unwrap();
    let left = kill_process_group(Pid::from_raw(pid).unwrap(), Signal::KILL);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let why = ended.last()["why"].as_str().unwrap();
    assert!(why.contains(&format!("the guest stays in its QEMU, process {pid}")), "{why}");
    assert!(left.is_ok(), "it was left as it was");
}
