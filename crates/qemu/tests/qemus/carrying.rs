//! Guests of real QEMUs whose own migration is carried, without an engine.

use std::time::{Duration, Instant};

use crate::carried::guests::{CHANNELS, DOWNTIME, check, each, machine, settings};
use crate::carried::relay::{Flow, begin, begin_into, hop};
use crate::support::{all, versions};
use serde_json::{Value, json};
use vmferry::vmm::streamed::StreamedVm;
use vmferry::{DestinationVm, Resume};
use vmferry_qemu::{CarriedSource, Expected, Mode, Qmp, Reached, StartedQemu};
use vmferry_qemu_lab::{Backend, Machine, Version, World};

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn emulated_guests_move_there_and_back() {
    each(|world, machine, mut here, channels| {
        for number in 1..=6 {
            let mut there = machine.incoming(world, &format!("there-{number}"));
            let passes = hop(&mut here, &there, channels);
            let numbers: Vec<u32> = passes.iter().map(|(number, _)| *number).collect();
            assert!(numbers.is_sorted() && !numbers.is_empty(), "{passes:?}");
            check(&mut there);
            here = there;
        }
    });
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn other_kinds_of_memory_are_carried() {
    for (backend, version) in [
        (Backend::Memfd, Version::V10_0),
        (Backend::File, Version::V10_0),
        (Backend::TwoNodes, Version::V7_2),
    ] {
        let world = World::new();
        let workload = "static=40 dirty=20";
        let machine = Machine { backend, vcpus: 2, kind: "pc", ..Machine::new(version, workload) };
        let mut here = machine.start(&world, "here");
        here.check_guest();
        let mut there = machine.incoming(&world, "there");
        hop(&mut here, &there, 2);
        there.check_guest();
    }
}

/// A guest that writes faster than its link carries reaches the downtime limit only if it is
/// throttled.
#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn throttle_moves_a_guest_that_outruns_its_link() {
    let world = World::new();
    let private = Machine { backend: Backend::Private, ..Machine::new(Version::V10_0, "dirty=12") };
    let machine = Machine { mib: 128, ..private };
    let mut here = machine.start(&world, "here");
    here.check_guest();
    let before = settings(&here.qmp);
    let slow = Flow::Slow(Duration::from_micros(1500));
    let downtime = Duration::from_millis(50);
    let kept = machine.incoming(&world, "kept");
    let source = CarriedSource::attach(&here.qmp, 0).unwrap();
    let mut carried = begin(source, &kept, slow, downtime).unwrap();
    for _ in 0..10 {
        carried.wait_for_pass();
    }
    let mut source = carried.give_up();

    let mut there = machine.incoming(&world, "there");
    source.allow_throttling(99).unwrap();
    let mut carried = begin(source, &there, slow, downtime).unwrap();
    carried.wait_stopped();
    carried.flow(Flow::Free);
    carried.source.finish().unwrap();
    carried.wait_completed();
    carried.destination.load(&[]).unwrap();
    carried.destination.discard();
    there.child.wait().unwrap();
    carried.give_up();
    here.check_guest();
    assert_eq!(settings(&here.qmp), before);
}

/// QEMU reports `finish-migrate` also for a guest that was already paused.
#[test]
fn operators_pause_reported_after_qemus_own_stays() {
    for &version in versions() {
        for channels in CHANNELS {
            let world = World::new();
            let operator = world.path("operator.qmp");
            let monitor = format!("unix:{},server=on,wait=off", operator.display());
            let machine = Machine::on_kvm(version, "hot=8,rate=40000").with(&["-qmp", &monitor]);
            let machine = Machine { backend: Backend::Private, ..machine };
            let mut here = machine.start_booted(&world, "here");
            here.check_guest();
            let mut operator = Qmp::connect(&operator).unwrap();
            let mut there = machine.incoming(&world, "there");
            let source = CarriedSource::attach(&here.qmp, channels).unwrap();
            let slow = Flow::Slow(Duration::from_micros(1500));
            let mut carried = begin(source, &there, slow, DOWNTIME).unwrap();
            carried.hold_news();
            operator.execute("stop", json!({})).unwrap();
            carried.flow(Flow::Free);
            let deadline = Instant::now() + Duration::from_secs(30);
            while status(&mut operator) != "finish-migrate" {
                assert!(Instant::now() < deadline, "{version:?}: QEMU never stops the guest");
                // Only clients that listen to vmferry's monitor are notified.
                std::thread::sleep(Duration::from_millis(5));
            }
            carried.let_news_go_on();
            carried.carry_all().unwrap();
            assert!(carried.source.is_paused(), "{version:?} with {channels} channels");
            carried.destination.run().unwrap();
            Resume::resume(&mut carried.source).unwrap();
            assert!(!carried.source.is_running(), "nor is it continued here");
            there.check_guest();
        }
    }
}

fn status(operator: &mut Qmp) -> Value {
    operator.execute("query-status", json!({})).unwrap()["status"].take()
}

/// The command line is the same as the source's.
#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn started_qemu_takes_a_carried_guest() {
    let world = World::new();
    let machine = machine(&world, Version::V7_2);
    let mut here = machine.start(&world, "here");
    check(&mut here);
    let line: Vec<String> = machine
        .command_line(&world, "there")
        .iter()
        .map(|word| format!("'{}'", word.display()))
        .collect();
    let libraries = machine.libraries().unwrap();
    let line = format!("env LD_LIBRARY_PATH={} {}", libraries.display(), line.join(" "));
    let socket = world.path("there.qmp");
    let mut destination = StartedQemu::start(&line, &socket, Expected::default()).unwrap();
    for channels in CHANNELS {
        let source = CarriedSource::attach(&here.qmp, channels).unwrap();
        let mut carried = begin_into(source, destination, Flow::Free, DOWNTIME).unwrap();
        carried.wait_stopped();
        // The next guest goes to a new QEMU.
        Resume::resume(&mut carried.source).unwrap();
        carried.destination.discard();
        assert!(!carried.destination.is_spent());
        carried.cut();
        carried.join();
        check(&mut here);
        destination = carried.destination;
    }
    let source = CarriedSource::attach(&here.qmp, 2).unwrap();
    let mut carried = begin_into(source, destination, Flow::Free, DOWNTIME).unwrap();
    carried.carry_all().unwrap();
    carried.destination.run().unwrap();
    let mut starter = carried.destination.into_starter().unwrap();
    let mut qmp = Qmp::connect(&socket).unwrap();
    let status = qmp.execute("query-status", serde_json::json!({})).unwrap();
    assert_eq!(status["status"], "running");
    qmp.quit().unwrap();
    starter.wait().unwrap();
}

/// QEMU must be able to reach the socket that it connects to, and no other user may.
#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn qemu_of_another_user_is_carried() {
    const USER: u32 = 54_321;
    if !rustix::process::geteuid().is_root() {
        panic!("this test needs root: it starts a QEMU of another user");
    }
    let world = World::new();
    world.give_to(USER).unwrap();
    let private = Machine { backend: Backend::Private, ..Machine::new(Version::V10_0, "dirty=10") };
    let machine = Machine { user: Some(USER), ..private };
    let mut here = machine.start(&world, "here");
    here.check_guest();
    for channels in CHANNELS {
        let mut there = machine.incoming(&world, &format!("there-{channels}"));
        hop(&mut here, &there, channels);
        there.check_guest();
        here = there;
    }
}

#[test]
fn guest_that_can_not_be_attached_is_carried() {
    let world = World::new();
    let start = |backend, version, name: &str| {
        let machine = Machine { backend, ..Machine::new(version, "dirty=5") };
        machine.start(&world, name)
    };
    for (backend, version, says) in [
        (Backend::Private, Version::V7_2, "memory-backend-file"),
        (Backend::Memfd, Version::V10_0, "is a memfd"),
    ] {
        let mut qemu = start(backend, version, &format!("{backend:?}"));
        match Reached::by(&qemu.qmp, Mode::Auto, 2).unwrap() {
            Reached::Carried { source, why: Some(why) } => {
                assert_eq!(source.streams(), 3);
                assert!(vmferry::chain(&why).contains(says), "{why}");
            }
            _ => panic!("it can't be attached"),
        }
        let refused = Reached::by(&qemu.qmp, Mode::Attached, 2).map(|_| ()).unwrap_err();
        assert!(refused.is_of_attaching() && vmferry::chain(&refused).contains(says), "{refused}");
        qemu.check_guest();
    }
    let mut qemu = start(Backend::File, Version::V10_0, "file");
    let reached = Reached::by(&qemu.qmp, Mode::Auto, 2).unwrap();
    assert!(matches!(reached, Reached::Attached(_)));
    drop(reached);
    let reached = Reached::by(&qemu.qmp, Mode::Carried, 0).unwrap();
    assert!(matches!(reached, Reached::Carried { why: None, .. }));
    qemu.check_guest();

    // Memory that only QEMU itself can migrate.
    let machine = Machine { backend: Backend::File, ..Machine::new(Version::V10_0, "dirty=5") };
    let shared = format!(
        "memory-backend-file,id=shared,size=1M,share=on,mem-path={}",
        world.path_on_tmpfs("peer").display()
    );
    let device = "ivshmem-plain,memdev=shared,master=on";
    let peer = machine.with(&["-object", &shared, "-device", device]).start(&world, "peer");
    match Reached::by(&peer.qmp, Mode::Auto, 0).unwrap() {
        Reached::Carried { why: Some(why), .. } => {
            assert!(why.to_string().contains("device_del"), "{why}");
        }
        _ => panic!("it can't be attached"),
    }
}

/// Such a guest would occasionally be corrupted if it ran.
#[test]
fn guest_whose_writes_qemu_would_lose_must_be_paused() {
    let world = World::new();
    let guests = [
        (Backend::Private, Version::V7_2, 0, true),
        (Backend::Private, Version::V10_0, 0, false),
        (Backend::TwoNodes, Version::V10_0, 8, true),
        (Backend::Private, Version::V7_2, 8, true),
        (Backend::Private, Version::V10_0, 8, true),
        (Backend::TwoNodes, Version::V10_0, 0, true),
    ];
    for &(backend, version, less_kib, stands_still) in &guests[..if all() { 6 } else { 3 }] {
        let machine = Machine { backend, less_kib, ..Machine::new(version, "dirty=5") };
        let name = format!("{backend:?}-{version:?}-{less_kib}");
        let mut qemu = machine.start(&world, &name);
        let source = CarriedSource::attach(&qemu.qmp, 0).unwrap();
        assert_eq!(source.must_stand_still(), stands_still, "{name}");
        drop(source);
        qemu.check_guest();
    }
}

#[test]
fn guest_that_can_not_be_migrated_is_refused() {
    let world = World::new();
    let shared = format!(
        "memory-backend-file,id=shared,size=1M,share=on,mem-path={}",
        world.path_on_tmpfs("shared").display()
    );
    let machine = Machine { backend: Backend::Private, ..Machine::new(Version::V10_0, "dirty=5") };
    let device = "ivshmem-plain,memdev=shared,master=off";
    let mut qemu =
        machine.clone().with(&["-object", &shared, "-device", device]).start(&world, "blocked");
    let refused = Reached::by(&qemu.qmp, Mode::Auto, 0).map(|_| ()).unwrap_err();
    assert!(refused.to_string().contains("peer mode"), "{refused}");
    qemu.check_guest();
    let waiting = machine.incoming(&world, "waiting");
    let refused = CarriedSource::attach(&waiting.qmp, 0).map(|_| ()).unwrap_err();
    assert!(refused.to_string().contains("must be running"), "{refused}");
    let refused = CarriedSource::attach(&qemu.qmp, 16).map(|_| ()).unwrap_err();
    assert!(refused.to_string().contains("too many"), "{refused}");
}
