//! Guests of real QEMUs whose own migration is carried, without an engine.

#[path = "carried/relay.rs"]
mod relay;

use std::path::{Path, PathBuf};
use std::time::Duration;

use relay::{Flow, begin, begin_into, hop, hop_of};
use vmferry::streamed::StreamedVm;
use vmferry::{DestinationVm, Resume};
use vmferry_qemu::{
    AbandonedQemu, CarriedSource, Expected, Mode, Qmp, Reached, Settings, StartedQemu,
};
use vmferry_qemu_lab::{Backend, Machine, Qemu, Version, World};

const DOWNTIME: Duration = Duration::from_millis(300);

/// Channels beside the main stream.
const CHANNELS: [u8; 2] = [0, 2];

fn all() -> bool {
    std::env::var_os("VMFERRY_TEST_ALL").is_some()
}

/// A guest with private memory, video memory and a disk.
fn machine(world: &World, version: Version) -> Machine {
    let disk = world.path("disk.raw");
    if !disk.exists() {
        world.disk(96);
    }
    let drive = format!("if=none,id=disk,format=raw,file={}", disk.display());
    let workload = "static=40 dirty=20 disk=16";
    let backend = Backend::Private;
    let private = Machine { backend, less_kib: 8, ..Machine::new(version, workload) };
    private.with(&["-device", "VGA", "-drive", &drive, "-device", "virtio-blk-pci,drive=disk"])
}

/// The guest has checked all of its memory and its disk since now.
fn check(qemu: &mut Qemu) {
    let before = qemu.check_guest().get("disk_rounds");
    let said = qemu.wait_for("uses its disk", |said| said.get("disk_rounds") > before);
    assert_eq!((said.get("disk_errors"), said.get("corruptions")), (0, 0), "{said:?}");
}

/// What its own migration is set to.
fn settings(qmp: &Path) -> Settings {
    Settings::read(&mut Qmp::connect(qmp).unwrap()).unwrap()
}

#[test]
fn guests_travel_there_and_back() {
    for version in Version::ALL {
        for channels in CHANNELS {
            println!("{version:?} with {channels} channels");
            let world = World::new();
            let machine = machine(&world, version);
            let mut here = machine.start(&world, "qemu-0");
            check(&mut here);
            for number in 1..=if all() { 6 } else { 2 } {
                let mut there = machine.incoming(&world, &format!("qemu-{number}"));
                let passes = hop(&mut here, &there, channels);
                let numbers: Vec<u32> = passes.iter().map(|(number, _)| *number).collect();
                assert!(numbers.is_sorted() && !numbers.is_empty(), "{passes:?}");
                check(&mut there);
                here = there;
            }
        }
    }
}

#[test]
fn memory_of_other_kinds_travels() {
    for (backend, version) in [
        (Backend::Memfd, Version::V10_0),
        (Backend::File, Version::V10_0),
        (Backend::TwoNodes, Version::V7_2),
    ] {
        let world = World::new();
        let workload = "static=40 dirty=20";
        let two = Machine { backend, vcpus: 2, kind: "pc", ..Machine::new(version, workload) };
        let machine = Machine { less_kib: 16, ..two };
        let mut here = machine.start(&world, "here");
        here.check_guest();
        let mut there = machine.incoming(&world, "there");
        hop(&mut here, &there, 2);
        there.check_guest();
    }
}

/// Where a migration is given up.
#[derive(Clone, Copy, Debug)]
enum Stage {
    /// QEMU can't get rid of its bytes, and the guest runs.
    Active,
    Stopped,
    /// QEMU can't get rid of the rest, and answers nobody.
    Finishing,
    /// The destination has taken all.
    Ready,
}

const STAGES: [Stage; 4] = [Stage::Active, Stage::Stopped, Stage::Finishing, Stage::Ready];

/// Begins, and gets as far as that.
fn reach(source: CarriedSource, to: &Qemu, stage: Stage) -> relay::Carried {
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
fn a_guest_runs_on_wherever_its_migration_is_given_up() {
    for version in Version::ALL {
        for channels in CHANNELS {
            let world = World::new();
            let machine = machine(&world, version);
            let mut here = machine.start(&world, "here");
            check(&mut here);
            let before = settings(&here.qmp);
            for stage in STAGES {
                println!("{version:?} with {channels} channels, {stage:?}");
                let there = machine.incoming(&world, &format!("{stage:?}"));
                let source = CarriedSource::attach(&here.qmp, channels).unwrap();
                let source = reach(source, &there, stage).give_up();
                check(&mut here);
                drop(source);
                assert_eq!(settings(&here.qmp), before);
            }
            // After all that it can still be moved, by the same source as one that was given up.
            let there = machine.incoming(&world, "there");
            let source = CarriedSource::attach(&here.qmp, channels).unwrap();
            let source = reach(source, &there, Stage::Stopped).give_up();
            let mut there = machine.incoming(&world, "finally");
            hop_of(source, &mut here, &there);
            check(&mut there);
        }
    }
}

#[test]
fn another_process_lets_an_abandoned_guest_run_on() {
    for version in Version::ALL {
        for channels in CHANNELS {
            let world = World::new();
            let machine = machine(&world, version);
            let mut here = machine.start(&world, "here");
            check(&mut here);
            // QEMU 10.0 may hang for ever when a channel of its multifd breaks while it writes.
            let stages = if channels == 0 { &STAGES[..] } else { &[Stage::Stopped, Stage::Ready] };
            for &stage in stages {
                println!("{version:?} with {channels} channels, {stage:?}");
                let there = machine.incoming(&world, &format!("{stage:?}"));
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
        }
    }
}

/// An operator cancels QEMU's migration, by another monitor.
#[test]
fn a_migration_that_somebody_else_ends_is_told() {
    for version in Version::ALL {
        for channels in CHANNELS {
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
}

#[test]
fn a_link_that_stalls_stops_nothing_but_the_migration() {
    for version in Version::ALL {
        for channels in CHANNELS {
            let world = World::new();
            let machine = machine(&world, version);
            let mut here = machine.start(&world, "here");
            check(&mut here);
            let mut there = machine.incoming(&world, "there");
            let source = CarriedSource::attach(&here.qmp, channels).unwrap();
            let mut carried = reach(source, &there, Stage::Active);
            // The guest runs, and QEMU takes orders.
            check(&mut here);
            carried.source.set_downtime(DOWNTIME * 2).unwrap();
            assert!(carried.source.is_running());
            carried.flow(Flow::Free);
            carried.carry_all().unwrap();
            carried.destination.run().unwrap();
            check(&mut there);
        }
    }
}

#[test]
fn a_destination_that_dies_costs_nothing() {
    for version in Version::ALL {
        for channels in CHANNELS {
            let world = World::new();
            let machine = machine(&world, version);
            let mut here = machine.start(&world, "here");
            check(&mut here);
            for stage in STAGES {
                println!("{version:?} with {channels} channels, {stage:?}");
                let mut there = machine.incoming(&world, &format!("{stage:?}"));
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
        }
    }
}

#[test]
fn a_destination_of_another_kind_is_refused() {
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
    let source = CarriedSource::attach(&here.qmp, 0).unwrap();
    let error = begin(source, &there, Flow::Free, DOWNTIME).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("a file of its own"), "{error}");
    here.check_guest();
}

#[test]
fn a_guest_that_qemu_can_t_load_runs_on() {
    for version in Version::ALL {
        let world = World::new();
        // The number of a device's vectors is in no list.
        let with = |vectors: u32| {
            let device = format!("virtio-rng-pci,vectors={vectors}");
            machine(&world, version).with(&["-device", &device])
        };
        let mut here = with(2).start(&world, "here");
        check(&mut here);
        for channels in CHANNELS {
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

/// A guest that outruns its link: it stops within the downtime only if it is slowed down.
#[test]
fn a_guest_that_writes_too_fast_is_throttled() {
    let world = World::new();
    let machine = Machine { backend: Backend::Private, ..Machine::new(Version::V10_0, "dirty=24") };
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

/// The command line is the source's own.
#[test]
fn a_qemu_that_vmferry_starts_takes_a_carried_guest() {
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
        // The next one goes to a new QEMU.
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
    let mut child = carried.destination.into_child().unwrap();
    let mut qmp = Qmp::connect(&socket).unwrap();
    let status = qmp.execute("query-status", serde_json::json!({})).unwrap();
    assert_eq!(status["status"], "running");
    qmp.execute("quit", serde_json::json!({})).unwrap();
    child.wait().unwrap();
}

/// QEMU must be able to reach the socket that it is told to connect to, and nobody else.
#[test]
fn a_qemu_of_another_user_is_carried() {
    const USER: u32 = 54_321;
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: only root can start a QEMU of another user");
        return;
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
fn a_guest_is_carried_where_it_can_t_be_attached() {
    let world = World::new();
    let start = |backend, version, name: &str| {
        let machine = Machine { backend, less_kib: 8, ..Machine::new(version, "dirty=5") };
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

    // What QEMU itself migrates, and nobody else sees.
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

/// Such a guest would be corrupted now and then.
#[test]
fn a_guest_whose_writes_qemu_would_lose_is_refused() {
    let world = World::new();
    let machine = Machine { backend: Backend::Private, ..Machine::new(Version::V7_2, "dirty=5") };
    let mut qemu = machine.start(&world, "here");
    let refused = Reached::by(&qemu.qmp, Mode::Auto, 0).map(|_| ()).unwrap_err();
    assert!(refused.to_string().contains("such as 262136 KiB"), "{refused}");
    qemu.check_guest();
}

#[test]
fn what_can_t_be_migrated_at_all_says_so() {
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
