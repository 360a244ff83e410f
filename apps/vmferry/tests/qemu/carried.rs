//! `send --qemu` with real QEMUs whose guests can't be attached and are carried: the same faults as
//! for attached guests with the same outcomes, and the differences.

use crate::support::scene::{Scene, Way};
use crate::support::{Host, World, all, faults, text};
use vmferry_qemu_lab::{Backend, Machine, Version, World as Lab};

fn private(version: Version) -> Machine {
    Machine { backend: Backend::Private, ..Machine::on_kvm(version, "hot=8,rate=40000") }
}

#[test]
fn sender_killed_in_any_phase_leaves_the_guest_running() {
    faults::sender_killed_in_any_phase_leaves_the_guest_running(Way::Carried);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn next_sender_tidies_up_after_a_killed_sender_and_guardian() {
    faults::next_sender_tidies_up_after_a_killed_sender_and_guardian(Way::Carried);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn receiver_or_its_qemu_killed_in_any_phase_leaves_the_guest_running() {
    faults::receiver_or_its_qemu_killed_in_any_phase_leaves_the_guest_running(Way::Carried);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn source_qemu_killed_in_any_phase_leaves_no_incomplete_guest_running() {
    faults::source_qemu_killed_in_any_phase_never_runs_half_a_guest(Way::Carried);
}

#[test]
fn link_cut_in_any_phase_leaves_the_guest_running() {
    faults::link_cut_in_any_phase_leaves_the_guest_running(Way::Carried);
}

#[test]
fn guest_runs_on_after_the_operator_cancels() {
    faults::guest_runs_on_after_the_operator_cancels(Way::Carried);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn lost_commit_is_resolved_when_the_link_returns() {
    faults::lost_commit_is_resolved_when_the_link_returns(Way::Carried);
}

#[test]
fn lost_commit_is_resolved_by_the_guardian() {
    faults::lost_commit_is_resolved_by_the_guardian(Way::Carried);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn lost_commit_is_resolved_by_the_operator() {
    faults::lost_commit_is_resolved_by_the_operator(Way::Carried);
}

#[test]
fn link_that_breaks_and_returns_while_the_guest_runs_ends_no_migration() {
    let mut scene = Scene::new(Version::V10_0, Way::Carried);
    let (mut there, mut receiving, send, proxy) = scene.cut_in_the_first_round();
    proxy.heal();
    let sent = send.finish().exited(0);
    let stats = sent.last();
    assert_eq!(stats["digest_match"], true);
    assert!(stats["reconnections"].as_u64() >= Some(2), "{stats}");
    receiving.event("link-restored");
    receiving.event("received");
    assert!(scene.here.child.wait().unwrap().success(), "the source's QEMU has exited regularly");
    there.check_guest();
}

/// `auto` attaches where it can, and gives the reason where it can't.
#[test]
fn send_reports_the_mode_and_its_reason() {
    let mut scene = Scene::of(private(Version::V10_0), Way::Carried);
    let tls = scene.world.tls();
    let (there, mut receiving, address) = scene.receive_tls();
    let qmp = scene.here.qmp.clone();
    let send = |more: &[&str]| {
        let mut arguments = vec!["send", "--qemu", text(&qmp), "--to", &address, "--tls", &tls];
        arguments.extend(more);
        scene.a.run(&arguments)
    };
    send(&["--mode", "attached"]).failed(6, "memory-backend-file");
    send(&["--verify"]).failed(2, "nothing to verify: do not ask for that");
    scene.here.check_guest();
    let sent = send(&["--multifd", "2"]).exited(0);
    let qemu = &sent.last()["qemu"];
    assert_eq!((&qemu["mode"], &qemu["streams"]), (&"carried".into(), &3.into()), "{qemu}");
    let why = qemu["not_attached"].as_str().unwrap();
    assert!(why.contains("memory-backend-file"), "{why}");
    receiving.event("received");
    scene.here.child.wait().unwrap();
    scene.here = there;
    scene.here.check_guest();

    // A guest that can be attached is attached; it is carried if the user asks for that, into a
    // QEMU that vmferry starts.
    let mut scene = Scene::new(Version::V10_0, Way::Attached);
    let command = scene.command("started");
    let tls = scene.world.tls();
    let (mut started, address) =
        scene.b.receive(&["--listen", "127.0.0.1:0", "--tls", &tls, "--exec", &command]);
    let send = ["send", "--qemu", text(&scene.here.qmp), "--to", &address, "--tls", &tls];
    let sent = scene.a.run(&[&send[..], &["--mode", "carried"]].concat()).exited(0);
    assert_eq!(sent.last()["qemu"]["streams"], 1);
    let received = started.event("received");
    scene.here.child.wait().unwrap();
    let back = scene.machine.incoming(&scene.lab, "back");
    let (mut receiving, address) = scene.a.receive(&[
        "--qemu",
        text(&back.qmp),
        "--listen",
        "127.0.0.1:0",
        "--tls",
        &tls,
        "--once",
    ]);
    let qmp = received["qmp"].as_str().unwrap();
    let sent = scene.b.run(&["send", "--qemu", qmp, "--to", &address, "--tls", &tls]).exited(0);
    assert_eq!(sent.last()["qemu"]["mode"], "attached");
    receiving.event("received");
    started.finish().exited(0);
    scene.here = back;
    scene.here.check_guest();
}

/// QEMU 7.2 without KVM loses writes in its own migrations, so its guest is paused throughout, or
/// stays.
#[test]
fn guest_that_qemu_would_damage_is_not_moved_while_it_runs() {
    let mut scene = Scene::emulated(Version::V7_2, Way::Carried);
    let tls = scene.world.tls();
    let (mut there, mut receiving, address) = scene.receive_tls();
    let qmp = scene.here.qmp.clone();
    let send = ["send", "--qemu", text(&qmp), "--to", &address, "--tls", &tls];
    scene.a.run(&send).failed(10, "--when-stuck switch-over");
    scene.here.check_guest();
    let sent = scene.a.run(&[&send[..], &["--when-stuck", "switch-over"]].concat()).exited(0);
    let stats = sent.last();
    assert_eq!(
        (&stats["qemu"]["stands_still"], &stats["qemu"]["streams"]),
        (&true.into(), &1.into())
    );
    let (downtime, total) = (stats["downtime_ms"].as_f64(), stats["total_ms"].as_f64());
    assert!(downtime > total.map(|total| total / 2.0), "{stats}");
    receiving.event("received");
    scene.here.child.wait().unwrap();
    there.check_guest();
}

/// The user `nobody`.
const NOBODY: u32 = 65534;

/// A vmferry of root carries the guest of another user's QEMU, which can't enter any of root's
/// directories.
#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn guest_of_another_user_is_carried() {
    if !rustix::process::geteuid().is_root() {
        panic!("this test needs root: it starts a QEMU of another user");
    }
    let (world, lab) = (World::new(), Lab::new());
    lab.give_to(NOBODY).unwrap();
    // That user may not open /dev/kvm.
    let emulated = Machine { mib: 128, ..Machine::new(Version::V10_0, "dirty=8") };
    let machine = Machine { user: Some(NOBODY), backend: Backend::Private, ..emulated };
    let mut here = machine.start(&lab, "here");
    here.check_guest();
    let mut there = machine.incoming(&lab, "there");
    let (a, b): (Host, Host) = (world.host("a"), world.host("b"));
    let tls = world.tls();
    let listen = ["--listen", "tcp:127.0.0.1:0", "--plain", "--sandbox", "require"];
    let required = b.run(&[&["receive", "--qemu", text(&there.qmp)], &listen[..]].concat());
    required.failed(16, "as `require` demands");
    let (mut receiving, address) = b.receive(&[
        "--qemu",
        text(&there.qmp),
        "--listen",
        "127.0.0.1:0",
        "--tls",
        &tls,
        "--once",
    ]);
    let send =
        ["send", "--qemu", text(&here.qmp), "--to", &address, "--tls", &tls, "--multifd", "3"];
    let sent = a.run(&send).exited(0);
    assert_eq!(sent.last()["qemu"]["streams"], 4);
    receiving.event("received");
    there.check_guest();
}

/// Differences between two QEMUs are found before anything is sent; QEMU itself would not report
/// them.
#[test]
fn mismatched_destination_is_refused_and_the_guest_runs_on() {
    let mut scene = Scene::of(private(Version::V10_0), Way::Carried);
    let other = |change: fn(&mut Machine)| {
        let mut machine = private(Version::V10_0);
        change(&mut machine);
        machine
    };
    let others = [
        (other(|machine| machine.mib = 256), "MiB"),
        (other(|machine| machine.vcpus = 2), "-smp"),
        (private(Version::V10_0).with(&["-device", "virtio-rng-pci"]), "virtio-rng-pci"),
    ];
    let all_of_them = all();
    for (machine, says) in others.into_iter().filter(|(_, says)| all_of_them || *says != "-smp") {
        let same = std::mem::replace(&mut scene.machine, machine);
        let (_there, receiving, address) = scene.receive_tls();
        scene.machine = same;
        let tls = scene.world.tls();
        let send = ["send", "--qemu", text(&scene.here.qmp), "--to", &address, "--tls", &tls];
        scene.a.run(&send).failed(6, says);
        receiving.finish().exited(6);
    }
    scene.runs_on_here();
    scene.arrives();
}

/// QEMU's user must reach its sockets, so their directory is not in vmferry's runtime directory,
/// and no list of a migration's files names it.
#[test]
fn sockets_of_a_killed_receiver_are_removed_by_the_next_one() {
    let (lab, world) = (Lab::new(), World::new());
    let (host, temporary) = (world.host("b"), tempfile::tempdir().unwrap());
    let qemu = private(Version::V10_0).incoming(&lab, "there");
    let receive = ["receive", "--qemu", text(&qemu.qmp), "--listen", "tcp:127.0.0.1:0", "--plain"];
    let start = || {
        let mut command = host.command(&receive);
        command.env("TMPDIR", temporary.path());
        let mut receiving = Host::spawn(command);
        receiving.event("listening");
        receiving
    };
    let names = || {
        let entries = std::fs::read_dir(temporary.path()).unwrap();
        entries.map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>()
    };
    let mut killed = start();
    let left = names();
    assert_eq!(left.len(), 1);
    killed.kill();
    assert_eq!(names(), left, "a killed process removes nothing");
    let mut next = start();
    assert!(names().len() == 1 && names() != left, "{left:?}, {:?}", names());
    next.signal(rustix::process::Signal::TERM);
    next.finish_by_ref();
    assert_eq!(names().len(), 0);
}
