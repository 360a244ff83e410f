//! `send --qemu`, `receive --qemu` and `receive --exec` with real QEMUs, and the death of each
//! process, phase by phase.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::time::Duration;

use crate::support::proxy::{Message, Proxy};
use crate::support::scene::{Scene, Way};
use crate::support::{Host, World, text};
use crate::support::{all, faults, in_parallel};
use serde_json::json;
use vmferry_qemu::Qmp;
use vmferry_qemu_lab::{Machine, Version, World as Lab};

/// All versions in the full matrix, one otherwise.
fn versions() -> &'static [Version] {
    if all() { &Version::ALL } else { &Version::ALL[1..] }
}

#[test]
fn guest_moves_there_and_back_and_into_a_started_qemu() {
    for version in versions() {
        let mut scene = Scene::new(*version, Way::Attached);
        let (there, mut receiving, address) = scene.receive_tls();
        let tls = scene.world.tls();
        let send = |host: &Host, qmp: &str, address: &str| {
            let sent =
                host.run(&["send", "--qemu", qmp, "--to", address, "--tls", &tls, "--verify"]);
            assert_eq!(sent.code, Some(0), "{sent:?}");
            sent.last().clone()
        };
        let stats = send(&scene.a, text(&scene.here.qmp), &address);
        assert_eq!(stats["verify_match"], true, "{stats}");
        assert!(stats["state_bytes"].as_u64().unwrap() > 10_000, "{stats}");
        assert_eq!(stats["dirty_log"], "userfaultfd", "{stats}");
        receiving.event("received");
        assert!(scene.here.child.wait().unwrap().success());
        scene.here = there;
        scene.here.check_guest();

        // Into a QEMU that vmferry starts from the same command line, over gRPC.
        let command = scene.command("started");
        let (mut started, address) =
            scene.a.receive(&["--listen", "grpc:127.0.0.1:0", "--tls", &tls, "--exec", &command]);
        send(&scene.b, text(&scene.here.qmp), &address);
        let received = started.event("received");
        let qmp = PathBuf::from(received["qmp"].as_str().unwrap());
        // The receiver ends with its QEMU.
        receiving.finish().exited(0);
        let mut monitor = Qmp::connect(&qmp).unwrap();
        assert_eq!(monitor.execute("query-status", json!({})).unwrap()["status"], "running");
        monitor.quit().unwrap();
        started.finish().exited(0);
    }
}

#[test]
fn sender_killed_in_any_phase_leaves_the_guest_running() {
    faults::sender_killed_in_any_phase_leaves_the_guest_running(Way::Attached);
}

/// The attach stops a thread of QEMU for microseconds and makes it run a system call. At whatever
/// moment the sender is killed, QEMU and its guest continue, and the next attach works.
#[test]
fn sender_killed_during_the_attach_harms_nothing() {
    let mut scene = Scene::new(Version::V10_0, Way::Attached);
    let tls = scene.world.tls();
    for attempt in 0..if all() { 300 } else { 20 } {
        let arguments =
            ["send", "--qemu", text(&scene.here.qmp), "--to", "127.0.0.1:1", "--tls", &tls];
        let mut send = scene.a.start(&arguments);
        // From before its QMP connection until after its end.
        std::thread::sleep(Duration::from_micros(attempt * 211 % 12_000));
        send.kill();
    }
    scene.here.check_guest();
    scene.arrives();
}

#[test]
fn next_sender_tidies_up_after_a_killed_sender_and_guardian() {
    faults::next_sender_tidies_up_after_a_killed_sender_and_guardian(Way::Attached);
}

#[test]
fn receiver_or_its_qemu_killed_in_any_phase_leaves_the_guest_running() {
    faults::receiver_or_its_qemu_killed_in_any_phase_leaves_the_guest_running(Way::Attached);
}

#[test]
fn source_qemu_killed_in_any_phase_leaves_no_incomplete_guest_running() {
    faults::source_qemu_killed_in_any_phase_never_runs_half_a_guest(Way::Attached);
}

#[test]
fn link_cut_in_any_phase_leaves_the_guest_running() {
    faults::link_cut_in_any_phase_leaves_the_guest_running(Way::Attached);
}

#[test]
fn link_that_breaks_and_returns_ends_no_migration() {
    let mut scene = Scene::new(Version::V10_0, Way::Attached);
    let (mut there, mut receiving, mut send, proxy) = scene.cut_in_the_first_round();
    proxy.heal();
    send.event("link-restored");
    // In the pause: QEMU runs on and is paused once more, or the handover asks again.
    send.event_where(|event| event["event"] == "round-started" && event["paused"] == true);
    proxy.cut();
    proxy.heal();
    let sent = send.finish().exited(0);
    let stats = sent.last();
    assert_eq!((&stats["digest_match"], &stats["verify_match"]), (&true.into(), &true.into()));
    assert!(stats["reconnections"].as_u64() >= Some(3), "{stats}");
    receiving.event("link-restored");
    receiving.event("received");
    assert!(scene.here.child.wait().unwrap().success(), "the source's QEMU has exited regularly");
    there.check_guest();
}

#[test]
fn guest_runs_on_after_the_operator_cancels() {
    faults::guest_runs_on_after_the_operator_cancels(Way::Attached);
}

#[test]
fn lost_commit_is_resolved_when_the_link_returns() {
    faults::lost_commit_is_resolved_when_the_link_returns(Way::Attached);
}

#[test]
fn lost_commit_is_resolved_by_the_guardian() {
    faults::lost_commit_is_resolved_by_the_guardian(Way::Attached);
}

#[test]
fn lost_commit_is_resolved_by_the_operator() {
    faults::lost_commit_is_resolved_by_the_operator(Way::Attached);
}

/// The user `nobody`.
const NOBODY: u32 = 65534;

#[test]
fn ordinary_user_moves_their_own_guest() {
    if !rustix::process::geteuid().is_root() {
        panic!("this test needs root: it becomes another user");
    }
    let binary = std::process::Command::new(env!("CARGO_BIN_EXE_vmferry"))
        .arg("--version")
        .uid(NOBODY)
        .output();
    if !binary.is_ok_and(|output| output.status.success()) {
        panic!("this test needs a checkout that other users may enter");
    }
    let (world, lab) = (World::new(), Lab::new());
    lab.give_to(NOBODY).unwrap();
    let machine =
        Machine { mib: 128, user: Some(NOBODY), ..Machine::new(Version::V10_0, "dirty=8") };
    let mut here = machine.start(&lab, "here");
    here.check_guest();
    let mut there = machine.incoming(&lab, "there");
    // Runtime directories and link where that user may create them.
    let host = |name: &str| Host { runtime: lab.path(&format!("host-{name}")) };
    let link = format!("unix:{}", lab.path("link").display());
    let mut receiving = host("b")
        .start_as(NOBODY, &["receive", "--qemu", text(&there.qmp), "--listen", &link, "--once"]);
    receiving.event("listening");
    let send = ["send", "--qemu", text(&here.qmp), "--to", &link, "--verify"];
    let sent = host("a").start_as(NOBODY, &send).finish().exited(0);
    assert_eq!(sent.last()["verify_match"], true);
    receiving.event("received");
    there.check_guest();
    drop(world);

    // That user may not attach to root's QEMU. A user with access to its monitor may carry the
    // guest.
    let mut theirs = Machine { user: None, ..machine.clone() }.start(&lab, "root");
    theirs.check_guest();
    std::fs::set_permissions(&theirs.qmp, std::fs::Permissions::from_mode(0o777)).unwrap();
    let mut there = machine.incoming(&lab, "there-too");
    let link = format!("unix:{}", lab.path("link-too").display());
    let mut receiving = host("b")
        .start_as(NOBODY, &["receive", "--qemu", text(&there.qmp), "--listen", &link, "--once"]);
    receiving.event("listening");
    let send = ["send", "--qemu", text(&theirs.qmp), "--to", &link];
    let attached = [&send[..], &["--mode", "attached"]].concat();
    host("a").start_as(NOBODY, &attached).finish().failed(1, "ptrace");
    let sent = host("a").start_as(NOBODY, &send).finish().exited(0);
    let why = sent.last()["qemu"]["not_attached"].as_str().unwrap_or_default();
    assert!(why.contains("ptrace"), "{sent:?}");
    receiving.event("received");
    there.check_guest();
}

#[test]
fn errors_name_the_cause_of_a_refused_migration() {
    let mut scene = Scene::new(Version::V10_0, Way::Attached);
    let tls = scene.world.tls();
    let nowhere = scene.world.path("nowhere.qmp");
    let send = |scene: &Scene, qmp: &str| {
        scene.a.run(&["send", "--qemu", qmp, "--to", "127.0.0.1:1", "--tls", &tls])
    };
    send(&scene, text(&nowhere)).failed(8, "-qmp unix:");
    // Nothing listens at the destination.
    send(&scene, text(&scene.here.qmp)).failed(3, "127.0.0.1:1");
    scene.runs_on_here();
    // A QEMU that runs a guest can't receive one.
    let running =
        ["receive", "--qemu", text(&scene.here.qmp), "--listen", "127.0.0.1:0", "--tls", &tls];
    scene.a.run(&running).failed(9, "-incoming defer");
    // A QEMU that waits for a guest has none to send.
    let empty = scene.machine.incoming(&scene.lab, "empty");
    send(&scene, text(&empty.qmp)).failed(9, "must be running");
    // A command that is not QEMU, and a QEMU that refuses its arguments.
    for (command, says) in [("true", "has ended"), ("no-such-qemu", "has ended")] {
        let receive = ["receive", "--exec", command, "--listen", "127.0.0.1:0", "--tls", &tls];
        scene.a.run(&receive).failed(1, says);
    }
    scene.runs_on_here();
}

/// READY does not arrive: the guest has been paused for too long before the destination has
/// promised to run it.
#[test]
fn pause_over_the_downtime_limit_is_given_up() {
    let ways = [Way::Attached, Way::Carried];
    in_parallel(ways[..if all() { 2 } else { 1 }].to_vec(), |way| {
        let mut scene = Scene::new(Version::V10_0, way);
        let (_there, _receiving, address) = scene.receive_plain();
        let proxy = Proxy::holding(&address, "127.0.0.1", Some(Message::Ready));
        let send = scene.send(&proxy.address, &["--plain", "--downtime-abort", "2s"]);
        proxy.await_held();
        send.finish().failed(10, "the migration is given up after 2.0 s");
        scene.runs_on_here();
    });
}
