//! `send --qemu` with real QEMUs whose guests can't be attached and are carried: the same faults as for those that can, with
//! the same outcomes, and what is different.

use crate::support::scene::{Scene, Way};
use crate::support::{Host, World, all, faults, text};
use vmferry_qemu_lab::{Backend, Machine, Version, World as Lab};

fn private(version: Version) -> Machine {
    Machine { backend: Backend::Private, ..Machine::on_kvm(version, "hot=8,rate=40000") }
}

#[test]
fn the_sender_is_killed_in_each_phase_and_the_guest_runs_on() {
    faults::the_sender_is_killed_in_each_phase_and_the_guest_runs_on(Way::Carried);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the long matrix: make test-all")]
fn sender_and_guardian_are_killed_and_the_next_sender_tidies_up() {
    faults::sender_and_guardian_are_killed_and_the_next_sender_tidies_up(Way::Carried);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the long matrix: make test-all")]
fn the_receiver_or_its_qemu_is_killed_in_each_phase() {
    faults::the_receiver_or_its_qemu_is_killed_in_each_phase(Way::Carried);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the long matrix: make test-all")]
fn the_source_s_qemu_is_killed_in_each_phase_and_never_half_a_guest_runs() {
    faults::the_source_s_qemu_is_killed_in_each_phase_and_never_half_a_guest_runs(Way::Carried);
}

#[test]
fn the_link_is_cut_in_each_phase() {
    faults::the_link_is_cut_in_each_phase(Way::Carried);
}

#[test]
fn cancelled_by_the_operator_it_runs_on() {
    faults::cancelled_by_the_operator_it_runs_on(Way::Carried);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the long matrix: make test-all")]
fn commit_is_lost_and_the_link_heals() {
    faults::commit_is_lost_and_the_link_heals(Way::Carried);
}

#[test]
fn commit_is_lost_and_the_sender_killed_and_the_guardian_asks() {
    faults::commit_is_lost_and_the_sender_killed_and_the_guardian_asks(Way::Carried);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the long matrix: make test-all")]
fn commit_is_lost_and_the_operator_decides() {
    faults::commit_is_lost_and_the_operator_decides(Way::Carried);
}

#[test]
fn the_link_breaks_while_the_guest_runs_and_comes_back() {
    let mut scene = Scene::new(Version::V10_0, Way::Carried);
    let (mut there, mut receiving, send, proxy) = scene.cut_in_the_first_round();
    proxy.heal();
    let sent = send.finish();
    assert_eq!(sent.code, Some(0), "{sent:?}");
    let stats = sent.last();
    assert_eq!(stats["digest_match"], true);
    assert!(stats["reconnections"].as_u64() >= Some(2), "{stats}");
    receiving.event("link-restored");
    receiving.event("received");
    assert!(scene.here.child.wait().unwrap().success(), "the source's QEMU has ended in order");
    there.check_guest();
}

/// `auto` attaches where it can, and says why where it can't.
#[test]
fn how_a_guest_is_moved_is_said_with_the_reason() {
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
    let sent = send(&["--multifd", "2"]);
    assert_eq!(sent.code, Some(0), "{sent:?}");
    let qemu = &sent.last()["qemu"];
    assert_eq!((&qemu["mode"], &qemu["streams"]), (&"carried".into(), &3.into()), "{qemu}");
    let why = qemu["not_attached"].as_str().unwrap();
    assert!(why.contains("memory-backend-file"), "{why}");
    receiving.event("received");
    scene.here.child.wait().unwrap();
    scene.here = there;
    scene.here.check_guest();

    // One that can be attached is; and is carried where the user wants it, into a QEMU that vmferry starts.
    let mut scene = Scene::new(Version::V10_0, Way::Attached);
    let command = scene.command("started");
    let tls = scene.world.tls();
    let (mut started, address) =
        scene.b.receive(&["--listen", "127.0.0.1:0", "--tls", &tls, "--exec", &command]);
    let send = ["send", "--qemu", text(&scene.here.qmp), "--to", &address, "--tls", &tls];
    let sent = scene.a.run(&[&send[..], &["--mode", "carried"]].concat());
    assert_eq!(sent.code, Some(0), "{sent:?}");
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
    let sent = scene.b.run(&["send", "--qemu", qmp, "--to", &address, "--tls", &tls]);
    assert_eq!(sent.code, Some(0), "{sent:?}");
    assert_eq!(sent.last()["qemu"]["mode"], "attached");
    receiving.event("received");
    assert_eq!(started.finish().code, Some(0));
    scene.here = back;
    scene.here.check_guest();
}

/// QEMU 7.2 without KVM loses writes in its own migrations: its guest stands still, or stays.
#[test]
fn a_guest_that_qemu_would_damage_is_not_moved_while_it_runs() {
    let mut scene = Scene::emulated(Version::V7_2, Way::Carried);
    let tls = scene.world.tls();
    let (mut there, mut receiving, address) = scene.receive_tls();
    let qmp = scene.here.qmp.clone();
    let send = ["send", "--qemu", text(&qmp), "--to", &address, "--tls", &tls];
    scene.a.run(&send).failed(10, "--when-stuck switch-over");
    scene.here.check_guest();
    let sent = scene.a.run(&[&send[..], &["--when-stuck", "switch-over"]].concat());
    assert_eq!(sent.code, Some(0), "{sent:?}");
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

/// The user that has nothing, on every Linux.
const NOBODY: u32 = 65534;

/// A vmferry of root carries the guest of another user's QEMU, which can enter none of its directories.
#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the long matrix: make test-all")]
fn a_guest_of_another_user_is_carried() {
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
    required.failed(16, "as `require` asks");
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
    let sent = a.run(&send);
    assert_eq!(sent.code, Some(0), "{sent:?}");
    assert_eq!(sent.last()["qemu"]["streams"], 4);
    receiving.event("received");
    there.check_guest();
}

/// What differs between two QEMUs is found before anything is sent, and QEMU itself would never say.
#[test]
fn a_destination_of_another_kind_is_refused_and_the_guest_goes_on() {
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
        assert_eq!(receiving.finish().code, Some(6));
    }
    scene.runs_on_here();
    scene.arrives();
}
