//! Carried guests whose migration fails.

use std::path::PathBuf;

use crate::carried::guests::{DOWNTIME, cases, check, each, machine, settings};
use crate::carried::relay::{Carried, Flow, begin, hop_of};
use vmferry::vmm::streamed::StreamedVm;
use vmferry::{DestinationVm, Resume};
use vmferry_qemu::{AbandonedQemu, CarriedSource, Expected, QemuDestination, QemuError, Qmp};
use vmferry_qemu_lab::{Backend, Machine, Qemu, Version, World};

/// The stage at which a migration is given up.
#[derive(Clone, Copy, Debug)]
enum Stage {
    /// QEMU's writes block, and the guest runs.
    Active,
    Stopped,
    /// QEMU's writes of the last pages block, and it answers no client.
    Finishing,
    /// The destination has received everything.
    Ready,
}

const STAGES: [Stage; 4] = [Stage::Active, Stage::Stopped, Stage::Finishing, Stage::Ready];

/// Starts a migration and brings it to that stage.
fn reach(source: CarriedSource, to: &Qemu, stage: Stage) -> Carried {
    let flow = if matches!(stage, Stage::Active) { Flow::Stopped } else { Flow::Free };
    let mut carried = begin(source, to, flow, DOWNTIME).unwrap();
    match stage {
        Stage::Active => carried.wait_for_pass(),
        Stage::Stopped => carried.wait_stopped(),
        Stage::Finishing => {
            carried.wait_stopped();
            carried.flow(Flow::Stopped);
            carried.source.finish().unwrap();
        }
        Stage::Ready => carried.carry_all().unwrap(),
    }
    carried
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn guest_runs_on_at_whatever_stage_its_migration_is_given_up() {
    each(|world, machine, mut here, channels| {
        let before = settings(&here.qmp);
        for stage in STAGES {
            println!("{stage:?}");
            let there = machine.incoming(world, &format!("{stage:?}"));
            let source = CarriedSource::attach(&here.qmp, channels).unwrap();
            let source = reach(source, &there, stage).give_up();
            check(&mut here);
            drop(source);
            assert_eq!(settings(&here.qmp), before);
        }
        // After all this the guest can still be moved, even by a source that gave up before.
        let there = machine.incoming(world, "there");
        let source = CarriedSource::attach(&here.qmp, channels).unwrap();
        let source = reach(source, &there, Stage::Stopped).give_up();
        let mut there = machine.incoming(world, "finally");
        hop_of(source, &mut here, &there);
        check(&mut there);
    });
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn abandoned_guest_is_resumed_by_another_process() {
    each(|world, machine, mut here, channels| {
        // QEMU 10.0 may hang forever when a multifd channel breaks while QEMU writes to it.
        let stages = if channels == 0 { &STAGES[..] } else { &[Stage::Stopped, Stage::Ready] };
        for &stage in stages {
            println!("{stage:?}");
            let there = machine.incoming(world, &format!("{stage:?}"));
            let source = CarriedSource::attach(&here.qmp, channels).unwrap();
            let before = source.settings().clone();
            let mut carried = reach(source, &there, stage);
            // A process that dies leaves no socket open.
            carried.cut();
            carried.join();
            drop(carried);
            let mut abandoned = AbandonedQemu::new(&here.qmp, Some(before.clone()));
            abandoned.resume().unwrap();
            check(&mut here);
            assert_eq!(settings(&here.qmp), before);
        }
    });
}

/// An operator cancels QEMU's migration through another monitor.
#[test]
fn migration_canceled_by_another_client_is_reported() {
    for (version, channels) in cases() {
        let world = World::new();
        let other = world.path("other.qmp");
        let socket = format!("unix:{},server=on,wait=off", other.display());
        let machine = machine(&world, version);
        let mut here = machine.clone().with(&["-qmp", &socket]).start(&world, "here");
        check(&mut here);
        for stage in [Stage::Active, Stage::Stopped] {
            let there = machine.incoming(&world, &format!("{stage:?}"));
            let source = CarriedSource::attach(&here.qmp, channels).unwrap();
            let mut carried = reach(source, &there, stage);
            let mut qmp = Qmp::connect(&other).unwrap();
            qmp.execute("migrate_cancel", serde_json::json!({})).unwrap();
            carried.flow(Flow::Free);
            let why = carried.wait_failed();
            assert!(why.to_string().contains("given its migration up"), "{why}");
            carried.give_up();
            check(&mut here);
        }
    }
}

#[test]
fn stalled_link_stops_only_the_migration() {
    each(|world, machine, mut here, channels| {
        let mut there = machine.incoming(world, "there");
        let source = CarriedSource::attach(&here.qmp, channels).unwrap();
        let runs = !source.must_stand_still();
        let mut carried = reach(source, &there, Stage::Active);
        // The guest runs, unless vmferry has paused it, and QEMU accepts commands.
        if runs {
            check(&mut here);
        }
        carried.source.set_downtime(DOWNTIME * 2).unwrap();
        assert_eq!(carried.source.is_running(), runs);
        carried.flow(Flow::Free);
        carried.carry_all().unwrap();
        carried.destination.run().unwrap();
        check(&mut there);
    });
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn destination_that_dies_leaves_the_guest_running() {
    each(|world, machine, mut here, channels| {
        for stage in STAGES {
            println!("{stage:?}");
            let mut there = machine.incoming(world, &format!("{stage:?}"));
            let source = CarriedSource::attach(&here.qmp, channels).unwrap();
            let mut carried = reach(source, &there, stage);
            there.child.kill().unwrap();
            there.child.wait().unwrap();
            carried.flow(Flow::Free);
            if matches!(stage, Stage::Stopped) {
                let why = carried.destination.load(&[]).unwrap_err();
                assert!(why.to_string().contains("has ended"), "{why}");
            }
            carried.give_up();
            check(&mut here);
        }
    });
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn carried_source_refuses_a_mismatched_destination() {
    let world = World::new();
    let machine = Machine { backend: Backend::Private, ..Machine::new(Version::V10_0, "dirty=10") };
    let mut here = machine.start(&world, "here");
    here.check_guest();
    let refused = |other: &Machine, name: &str| {
        let there = other.incoming(&world, name);
        let source = CarriedSource::attach(&here.qmp, 0).unwrap();
        match begin(source, &there, Flow::Free, DOWNTIME) {
            Ok(_) => panic!("{name} is taken"),
            Err(error) => vmferry::chain(&error),
        }
    };
    let more = refused(&machine.clone().with(&["-device", "virtio-rng-pci"]), "more");
    assert!(more.contains("virtio-rng-pci"), "{more}");
    let two = refused(&Machine { vcpus: 2, ..machine.clone() }, "two");
    assert!(two.contains("-smp"), "{two}");
    let small = refused(&Machine { mib: 128, ..machine.clone() }, "small");
    assert!(small.contains("ram of 128 MiB") && small.contains("ram of 256 MiB"), "{small}");
    here.check_guest();

    // Both QEMUs would write the same memory.
    let machine = Machine { backend: Backend::File, ..machine };
    let mut here = machine.start(&world, "same-here");
    here.check_guest();
    let path = |name: &str| -> PathBuf { world.path_on_tmpfs(&format!("same-{name}-ram")) };
    std::os::unix::fs::symlink(path("here"), path("there")).unwrap();
    let there = machine.incoming(&world, "same-there");
    let error = QemuDestination::attach(&there.qmp, Expected::default()).map(|_| ()).unwrap_err();
    let holder = here.child.id();
    assert!(matches!(error, QemuError::FileInUse { pid, .. } if pid == holder), "{error}");
    here.check_guest();
}

#[test]
fn guest_that_can_not_be_loaded_runs_on() {
    for version in Version::ALL {
        let world = World::new();
        // The number of a device's vectors is not part of the compared description.
        let with = |vectors: u32| {
            let device = format!("virtio-rng-pci,vectors={vectors}");
            machine(&world, version).with(&["-device", &device])
        };
        let mut here = with(2).start(&world, "here");
        check(&mut here);
        for (_, channels) in cases().into_iter().filter(|(of, _)| *of == version) {
            let mut there = with(4).incoming(&world, &format!("there-{channels}"));
            let source = CarriedSource::attach(&here.qmp, channels).unwrap();
            let mut carried = begin(source, &there, Flow::Free, DOWNTIME).unwrap();
            carried.wait_stopped();
            carried.source.finish().unwrap();
            let error = carried.destination.load(&[]).unwrap_err();
            let lives_on = version == Version::V10_0;
            let says = if lives_on { "load of migration failed" } else { "has ended" };
            assert!(vmferry::chain(&*error).contains(says), "{error}");
            assert!(carried.destination.is_spent());
            carried.give_up();
            assert!(!there.child.wait().unwrap().success() || lives_on);
            check(&mut here);
        }
    }
}
