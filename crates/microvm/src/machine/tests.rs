//! Complete guests, on KVM and as threads.

use std::time::{Duration, Instant};

use vmferry::{DestinationVm, Landing, PrepareError, Resume, SourceVm};
use vmferry_dirty::{LogChoice, SoftwareWay};
use vmferry_memory::{MemoryKind, PageSet, SlotId, whole_hash};
use vmferry_wire::GuestIdentity;

use super::*;
use crate::config::GuestConfig;
use crate::embed::{IncomingMachine, MigratingMachine};
use crate::state::StateError;

mod balloon;
mod display;
mod driver;
mod golden;
mod heap;
mod logs;
mod throttle;

const MIB: u64 = 1 << 20;
/// Ends a test that hangs. Everything here takes far less time.
const PATIENCE: Duration = Duration::from_secs(60);

fn config(kind: GuestKind, vcpus: u8, command_line: &str) -> MachineConfig {
    MachineConfig {
        identity: GuestIdentity { uuid: uuid::Uuid::from_u128(7), name: "test".into() },
        guest: GuestConfig {
            memory_bytes: 64 * MIB,
            vcpus,
            command_line: command_line.into(),
            balloon: false,
        },
        kind,
        memory_kind: MemoryKind::Private,
        dirty_log: LogChoice::Auto,
        device_log: SoftwareWay::Switch,
    }
}

/// Both kinds of guest. The tests fail without `/dev/kvm`.
const KINDS: [GuestKind; 2] = [GuestKind::Process, GuestKind::Kvm];

fn wait_for(machine: &Machine, what: &str, done: impl Fn(&Report) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done(&machine.report().unwrap()) {
        assert_eq!(machine.crash(), None, "{}", machine.serial_text());
        assert!(Instant::now() < deadline, "never {what}: {:?}", machine.report().unwrap());
        // The guest reports in its memory, so there is no event to wait for.
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn started(config: MachineConfig) -> Machine {
    start(Machine::new(config).unwrap())
}

fn start(mut machine: Machine) -> Machine {
    machine.start().unwrap();
    wait_for(&machine, "populated", |report| report.populated);
    machine
}

/// Waits until the guest has checked all its memory once more, and has seen new heartbeats.
fn check_all(machine: &Machine) -> Report {
    let before = machine.report().unwrap();
    wait_for(machine, "checked all", |now| {
        now.has_checked_all_since(&before)
            && now.ticks >= before.ticks + 20
            && now.heartbeats >= before.heartbeats + 20
    });
    machine.report().unwrap()
}

fn copy(set: &PageSet, from: &GuestMemory, to: &GuestMemory) {
    for run in set.runs() {
        let mut bytes = vec![0; run.pages as usize * vmferry_memory::PAGE_SIZE];
        from.copy_out(run, &mut bytes).unwrap();
        to.copy_in(run, &bytes).unwrap();
    }
}

const WORKLOAD: &str = "ticks fill=4,incompressible hot=8,rate=200000,random";

#[test]
fn pause_stops_the_guest_and_resume_continues_it() {
    for kind in KINDS {
        let mut machine = started(config(kind, 3, WORKLOAD));
        for _ in 0..5 {
            let before = machine.report().unwrap();
            wait_for(&machine, "went on", |now| now.ticks > before.ticks + 2);
            machine.pause().unwrap();
            let hash = whole_hash(machine.memory()).unwrap();
            machine.pause().unwrap();
            std::thread::sleep(Duration::from_millis(20));
            assert!(hash == whole_hash(machine.memory()).unwrap(), "a paused guest wrote");
            assert_eq!(machine.phase(), "paused");
            machine.resume().unwrap();
            machine.resume().unwrap();
            assert!(machine.is_running());
        }
        assert_eq!(check_all(&machine).corruptions, 0);
    }
}

#[test]
fn save_and_load_continue_the_guest_in_another_machine() {
    for kind in KINDS {
        let mut machine = started(config(kind, 2, WORKLOAD));
        for _ in 0..3 {
            let heard = machine.report().unwrap().heartbeats;
            wait_for(&machine, "heard its device", |now| now.heartbeats > heard + 20);
            machine.pause().unwrap();
            let state = machine.save().unwrap();
            let before = machine.report().unwrap();
            let mut next = Machine::new(config(kind, 2, WORKLOAD)).unwrap();
            copy(&machine.memory().populated().unwrap(), machine.memory(), next.memory());
            drop(machine);
            next.load(&state).unwrap();
            assert_eq!(next.phase(), "paused");
            assert_eq!(next.report().unwrap(), before, "loading changed guest memory");
            next.resume().unwrap();
            let after = check_all(&next);
            assert!(after.corruptions == 0 && after.ticks > before.ticks, "{after:?}");
            machine = next;
        }
    }
}

/// A minimal live migration: copies all pages, and then the dirty pages while the guest writes.
fn migrate(
    config: &MachineConfig,
    log: impl FnOnce(&Machine) -> Arc<dyn DirtyLog>,
) -> (String, Report) {
    migrate_from(started(config.clone()), config, log)
}

fn migrate_from(
    mut source: Machine,
    config: &MachineConfig,
    log: impl FnOnce(&Machine) -> Arc<dyn DirtyLog>,
) -> (String, Report) {
    wait_for(&source, "heard its device", |now| now.heartbeats > 20);
    let mut target = Machine::new(config.clone()).unwrap();
    let log = log(&source);
    log.start().unwrap();
    copy(&source.memory().populated().unwrap(), source.memory(), target.memory());
    let mut dirty = PageSet::for_memory(source.memory());
    for _ in 0..10 {
        dirty.clear_all();
        log.collect(&mut dirty).unwrap();
        for slot in source.memory().slots() {
            log.rearm(slot.id(), 0, dirty.bitmap(slot.id()).words()).unwrap();
        }
        copy(&dirty, source.memory(), target.memory());
        std::thread::sleep(Duration::from_millis(20));
    }
    source.pause().unwrap();
    dirty.clear_all();
    log.collect_last(&mut dirty).unwrap();
    copy(&dirty, source.memory(), target.memory());
    log.stop().unwrap();
    target.load(&source.save().unwrap()).unwrap();
    drop(source);
    target.resume().unwrap();
    (log.name().to_owned(), check_all(&target))
}

#[test]
fn requests_in_the_wrong_phase_are_refused() {
    let mut machine = Machine::new(config(GuestKind::Process, 1, "ticks")).unwrap();
    let refused = |result: Result<(), MachineError>, is: &str| {
        let text = result.unwrap_err().to_string();
        assert!(text.starts_with(&format!("the guest is {is}, and must be")), "{text}");
    };
    refused(machine.pause(), "not started");
    refused(machine.resume(), "not started");
    refused(machine.save().map(drop), "not started");
    machine.start().unwrap();
    refused(machine.start(), "running");
    refused(machine.save().map(drop), "running");
    refused(machine.load(&[]), "running");
    machine.pause().unwrap();
    refused(machine.start(), "paused");
    let state = machine.save().unwrap();
    refused(machine.load(&state), "paused");
}

#[test]
fn load_refuses_a_foreign_state_and_leaves_the_machine_new() {
    let mut machine = started(config(GuestKind::Process, 2, "ticks"));
    machine.pause().unwrap();
    let state = machine.save().unwrap();
    let mut other = Machine::new(config(GuestKind::Process, 3, "ticks")).unwrap();
    let text = other.load(&state).unwrap_err().to_string();
    assert!(text.contains("process") && text.contains("vCPUs"), "{text}");
    for length in 0..state.len() {
        assert!(other.load(&state[..length]).is_err(), "{length}");
    }
    assert_eq!(other.phase(), "not started");
    for kind in KINDS {
        let mut machine = Machine::new(config(kind, 2, "ticks")).unwrap();
        match machine.load(&state) {
            Ok(()) => assert_eq!(kind, GuestKind::Process),
            Err(MachineError::State(StateError::Unknown { name, .. })) => {
                assert!(kind == GuestKind::Kvm && name == "process", "{kind} {name}");
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn choice_names_the_reason_for_the_back_end() {
    let machine = Machine::new(config(GuestKind::Process, 1, "idle")).unwrap();
    assert_eq!(
        (machine.kind(), machine.choice()),
        ("process", "threads of a process, as requested")
    );
    let machine = Machine::new(config(GuestKind::Auto, 1, "idle")).unwrap();
    match KvmBackend::available() {
        Ok(()) => assert_eq!((machine.kind(), machine.choice()), ("kvm", "/dev/kvm is usable")),
        Err(error) => {
            assert_eq!(machine.kind(), "process");
            assert!(machine.choice().contains(&error.to_string()));
        }
    }
}

#[test]
fn drop_releases_the_memory() {
    for kind in KINDS {
        let machine = started(config(kind, 2, WORKLOAD));
        let mapped = Arc::downgrade(&machine.mapped);
        drop(machine);
        assert!(mapped.upgrade().is_none(), "a thread of {kind} holds the memory");
    }
}

#[test]
fn migrating_machine_remains_accessible_and_resumes_after_failure() {
    for kind in KINDS {
        let source = Machine::shared(config(kind, 2, WORKLOAD)).unwrap();
        source.lock().start().unwrap();
        wait_for(&source.lock(), "populated", |report| report.populated);
        let mut migrating = MigratingMachine::new(Arc::clone(&source)).unwrap();
        let description = migrating.describe();
        assert_eq!(description.vmm, format!("microvm/{kind}"));
        migrating.pause().unwrap();
        assert_eq!(source.lock().phase(), "paused", "other owners see the pause");
        let state = migrating.save().unwrap();

        let mut incoming = IncomingMachine::default();
        for _ in 0..2 {
            let Landing::Memory(memory) = incoming.prepare(&description).unwrap() else { panic!() };
            assert_eq!(memory.populated().unwrap().count(), 0);
            copy(&migrating.memory().populated().unwrap(), &migrating.memory(), &memory);
            incoming.load(&state).unwrap();
            incoming.discard();
            assert!(incoming.machine.is_none() && incoming.load(&state).is_err());
        }
        let Landing::Memory(memory) = incoming.prepare(&description).unwrap() else { panic!() };
        copy(&migrating.memory().populated().unwrap(), &migrating.memory(), &memory);
        incoming.load(&state).unwrap();
        incoming.run().unwrap();
        let target = incoming.machine.take().unwrap();
        let target = target.lock();
        assert_eq!(target.config().identity, description.identity);
        assert_eq!(check_all(&target).corruptions, 0);
        migrating.resume().unwrap();
        assert!(source.lock().is_running(), "a failed migration resumes the source");
    }
}

#[test]
fn incoming_machine_refuses_an_unexpected_guest() {
    let source = Machine::shared(config(GuestKind::Process, 1, "idle")).unwrap();
    let description = MigratingMachine::new(source).unwrap().describe();
    let refused = |incoming: IncomingMachine, change: &dyn Fn(&mut vmferry::GuestDescription)| {
        let (mut incoming, mut description) = (incoming, description.clone());
        change(&mut description);
        let error = incoming.prepare(&description).expect_err("refused");
        assert!(incoming.machine.is_none());
        error
    };
    let any = IncomingMachine::default;
    let expects_name = IncomingMachine { expect_name: Some("other".into()), ..any() };
    assert!(matches!(refused(expects_name, &|_| {}), PrepareError::Identity { .. }));
    let expects_uuid = IncomingMachine { expect_uuid: Some(uuid::Uuid::nil()), ..any() };
    assert!(matches!(refused(expects_uuid, &|_| {}), PrepareError::Identity { .. }));
    let expects_memory = IncomingMachine { expect_memory: Some(32 * MIB), ..any() };
    assert!(matches!(refused(expects_memory, &|_| {}), PrepareError::Layout { .. }));
    let error = refused(any(), &|guest| guest.layout[0].pages += 1);
    assert!(matches!(error, PrepareError::Layout { .. }));
    for change in [
        &(|guest: &mut vmferry::GuestDescription| guest.vmm = "other/kvm".into())
            as &dyn Fn(&mut vmferry::GuestDescription),
        &|guest| guest.config = b"{".to_vec(),
        &|guest| guest.config = br#"{"memory_bytes":67108864,"vcpus":1}"#.to_vec(),
        &|guest| {
            let text = r#"{"memory_bytes":67108864,"vcpus":99,"command_line":""}"#;
            guest.config = text.as_bytes().to_vec();
        },
        &|guest| guest.identity.name = "../up".into(),
    ] {
        let error = refused(any(), change);
        assert!(matches!(error, PrepareError::Incompatible(_)), "{error}");
    }
    any().prepare(&description).unwrap();
}
