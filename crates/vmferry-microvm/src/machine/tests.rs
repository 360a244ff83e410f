//! Whole guests, on KVM and as threads. Those on KVM are skipped, by name, where there is no
//! `/dev/kvm`; where there is one, a KVM that does not serve is a failure.

use std::path::Path;
use std::time::{Duration, Instant};

use vmferry::{DestinationVm, PrepareError, Resume, SourceVm};
use vmferry_dirty::LogChoice;
use vmferry_memory::{MemoryKind, PageSet, SlotId, whole_hash};
use vmferry_wire::GuestIdentity;

use super::*;
use crate::config::GuestConfig;
use crate::embed::{IncomingMachine, MigratingMachine};
use crate::kvm::{DISPLAY, HIGH_RAM, STILL};
use crate::state::StateError;

const MIB: u64 = 1 << 20;
/// Far more than anything here takes: a limit for what hangs, not a measure.
const PATIENCE: Duration = Duration::from_secs(60);

fn config(kind: GuestKind, vcpus: u8, command_line: &str) -> MachineConfig {
    MachineConfig {
        identity: GuestIdentity { uuid: uuid::Uuid::from_u128(7), name: "test".into() },
        guest: GuestConfig { memory_bytes: 64 * MIB, vcpus, command_line: command_line.into() },
        kind,
        memory_kind: MemoryKind::Private,
        dirty_log: LogChoice::Auto,
    }
}

/// The kinds of guest that this host can run.
fn kinds(test: &str) -> Vec<GuestKind> {
    let mut kinds = vec![GuestKind::Process];
    if Path::new("/dev/kvm").exists() {
        kinds.push(GuestKind::Kvm);
    } else {
        eprintln!("SKIPPED {test} on KVM: this host has no /dev/kvm");
    }
    kinds
}

/// Reserved huge pages, where this host has enough of them for two guests.
fn huge_pages(test: &str) -> Option<MemoryKind> {
    let mut layout = config(GuestKind::Process, 1, WORKLOAD).guest.layout();
    layout.iter_mut().for_each(|slot| slot.pages *= 2);
    match GuestMemory::allocate(&layout, MemoryKind::Hugetlb) {
        Ok(_) => Some(MemoryKind::Hugetlb),
        Err(error) => {
            eprintln!("SKIPPED {test} on huge pages: {error}");
            None
        }
    }
}

fn wait_for(machine: &Machine, what: &str, done: impl Fn(&Report) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done(&machine.report().unwrap()) {
        assert_eq!(machine.crash(), None, "{}", machine.serial_text());
        assert!(Instant::now() < deadline, "never {what}: {:?}", machine.report().unwrap());
        // The guest reports by its memory, which wakes nobody.
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

/// Waits until the guest has checked all its memory from now on, and has seen its device go on.
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
    let mut bytes = Vec::new();
    for run in set.runs() {
        bytes.resize(run.pages as usize * vmferry_memory::PAGE_SIZE, 0);
        from.copy_out(run, &mut bytes).unwrap();
        to.copy_in(run, &bytes).unwrap();
    }
}

const WORKLOAD: &str = "ticks fill=4,incompressible hot=8,rate=200000,random";

#[test]
fn a_paused_guest_stands_still_and_a_resumed_one_goes_on() {
    for kind in kinds("a_paused_guest_stands_still_and_a_resumed_one_goes_on") {
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
fn a_saved_guest_goes_on_in_another_machine() {
    for kind in kinds("a_saved_guest_goes_on_in_another_machine") {
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

/// A guest that draws and reads goes on where it was; damage to either slot of its display, or to
/// what it reads, is reported by the guest itself.
#[test]
fn a_guest_with_a_display_moves_and_finds_damage_to_it() {
    const LINE: &str = "display read=8 ticks";
    for kind in kinds("a_guest_with_a_display_moves_and_finds_damage_to_it") {
        let mut source = started(config(kind, 2, LINE));
        let slots: Vec<_> = source.memory().layout().iter().map(|slot| slot.gpa).collect();
        assert_eq!(slots, [0, DISPLAY, STILL]);
        let reading = (16 << 20) + 77 * 4096;
        for damaged in [None, Some(DISPLAY + 3 * 4096), Some(STILL + 5 * 4096), Some(reading)] {
            let seen = source.report().unwrap();
            wait_for(&source, "went on", |now| {
                now.frames > seen.frames + 3 && now.read_rounds > seen.read_rounds
            });
            source.pause().unwrap();
            let (state, before) = (source.save().unwrap(), source.report().unwrap());
            let mut target = Machine::new(config(kind, 2, LINE)).unwrap();
            copy(&source.memory().populated().unwrap(), source.memory(), target.memory());
            target.load(&state).unwrap();
            assert_eq!(target.report().unwrap(), before, "loading changed guest memory");
            if let Some(gpa) = damaged {
                let mut word = [0; 8];
                target.memory().read_at(gpa + 2048, &mut word).unwrap();
                word[3] ^= 1;
                target.memory().write_at(gpa + 2048, &word).unwrap();
            }
            target.resume().unwrap();
            let after = check_all(&target);
            assert!(after.frames >= before.frames + 2, "{kind}: {after:?}");
            assert_eq!(after.corruptions > 0, damaged.is_some(), "{kind}: {after:?}");
            assert_eq!(after.first_corruption.map(|first| first.gpa), damaged, "{kind}");
            source.resume().unwrap();
        }
    }
}

#[test]
fn a_display_lies_between_the_memory_below_and_above_4_gib() {
    for kind in kinds("a_display_lies_between_the_memory_below_and_above_4_gib") {
        let mut config = config(kind, 2, "display fill=1,text ticks");
        config.guest.memory_bytes = 4 << 30;
        let machine = started(config);
        let slots: Vec<_> = machine.memory().layout().iter().map(|slot| slot.gpa).collect();
        assert_eq!(slots, [0, DISPLAY, STILL, HIGH_RAM]);
        assert_eq!(check_all(&machine).corruptions, 0, "{kind}");
    }
}

/// What a dirty log sees of a guest that draws and reads: the frame buffer whole, and nothing else
/// but what the guest keeps in the machine's own memory.
#[test]
fn a_frame_buffer_is_dirty_and_what_is_beside_it_or_only_read_is_not() {
    let logs = [LogChoice::Userfaultfd, LogChoice::KvmBitmap, LogChoice::KvmClear];
    for kind in kinds("a_frame_buffer_is_dirty_and_what_is_beside_it_or_only_read_is_not") {
        for dirty_log in logs {
            if kind == GuestKind::Process && dirty_log != LogChoice::Userfaultfd {
                continue;
            }
            let config = MachineConfig { dirty_log, ..config(kind, 2, "display read=8") };
            let mut machine = started(config);
            let log = machine.dirty_log().unwrap();
            log.start().unwrap();
            let mut dirty = PageSet::for_memory(machine.memory());
            // The first harvest may say that all is dirty.
            for harvest in 0..3 {
                dirty.clear_all();
                log.collect(&mut dirty).unwrap();
                for slot in machine.memory().slots() {
                    log.rearm(slot.id(), 0, dirty.bitmap(slot.id()).words()).unwrap();
                }
                if harvest == 2 {
                    break;
                }
                let seen = machine.report().unwrap();
                wait_for(&machine, "drawn and read", |now| now.has_checked_all_since(&seen));
            }
            machine.pause().unwrap();
            let count = |slot| dirty.bitmap(SlotId(slot)).count();
            assert_eq!((count(1), count(2)), (8, 0), "{kind} {dirty_log}");
            let ram = dirty.bitmap(SlotId(0));
            let written: Vec<_> = (4096..ram.pages()).filter(|&page| ram.is_set(page)).collect();
            assert!(written.is_empty(), "{kind} {dirty_log}: only read: {written:x?}");
            log.stop().unwrap();
        }
    }
}

/// The least live migration: what is logged while the guest writes is copied again.
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
    log.collect(&mut dirty).unwrap();
    copy(&dirty, source.memory(), target.memory());
    log.stop().unwrap();
    target.load(&source.save().unwrap()).unwrap();
    drop(source);
    target.resume().unwrap();
    (log.name().to_owned(), check_all(&target))
}

#[test]
fn the_dirty_log_sees_every_write_of_guest_and_device() {
    let logs =
        [LogChoice::Userfaultfd, LogChoice::KvmBitmap, LogChoice::KvmClear, LogChoice::KvmRing];
    for kind in kinds("the_dirty_log_sees_every_write_of_guest_and_device") {
        for dirty_log in logs {
            if kind == GuestKind::Process && dirty_log != LogChoice::Userfaultfd {
                continue;
            }
            let mut cases = vec![
                (MemoryKind::Private, WORKLOAD),
                (MemoryKind::Memfd, WORKLOAD),
                (MemoryKind::Thp, WORKLOAD),
                (MemoryKind::Private, "display read=8 hot=4,rate=100000"),
                (MemoryKind::Memfd, "display"),
            ];
            let huge = huge_pages("the_dirty_log_sees_every_write_of_guest_and_device");
            cases.extend(huge.map(|kind| (kind, WORKLOAD)));
            for (memory_kind, workload) in cases {
                let config = MachineConfig { dirty_log, memory_kind, ..config(kind, 2, workload) };
                let (name, report) = migrate(&config, |machine| machine.dirty_log().unwrap());
                assert_eq!(report.corruptions, 0, "{kind} {name} {memory_kind}: {report:?}");
            }
        }
    }
}

/// The vCPUs' threads make room in their rings while the log harvests them.
#[test]
fn a_dirty_ring_that_gets_full_loses_nothing() {
    if !kinds("a_dirty_ring_that_gets_full_loses_nothing").contains(&GuestKind::Kvm) {
        return;
    }
    let config = MachineConfig {
        dirty_log: LogChoice::KvmRing,
        ..config(GuestKind::Kvm, 2, "ticks fill=4,incompressible hot=24,random")
    };
    let mut source = Machine::new(config.clone()).unwrap();
    let kvm = KvmConfig {
        vcpus: 2,
        command_line: config.guest.command_line.clone(),
        serial: None,
        dirty_ring: DirtyRing::Required(1024),
    };
    let backend = KvmBackend::new(kvm, Arc::clone(&source.mapped)).unwrap();
    let rings = Arc::clone(backend.rings().unwrap());
    source.backend = Box::new(backend);
    let (name, report) =
        migrate_from(start(source), &config, |machine| machine.dirty_log().unwrap());
    assert_eq!((name.as_str(), report.corruptions), ("kvm-ring", 0), "{report:?}");
    assert!(rings.full_exits() > 0, "6,144 pages fill rings of 1,024 entries");
}

#[test]
fn a_machine_that_was_made_without_rings_has_no_log_of_them() {
    if kinds("a_machine_that_was_made_without_rings_has_no_log_of_them").contains(&GuestKind::Kvm) {
        let mut machine = Machine::new(config(GuestKind::Kvm, 1, "idle")).unwrap();
        machine.config.dirty_log = LogChoice::KvmRing;
        let error = machine.dirty_log().err().unwrap().to_string();
        assert!(error.contains("dirty-log") && error.contains("not made for it"), "{error}");
    }
}

/// The check has teeth: a log that misses the device's writes, or all, is found out.
#[test]
fn a_dirty_log_that_forgets_is_found_out() {
    for kind in kinds("a_dirty_log_that_forgets_is_found_out") {
        let config = config(kind, 2, WORKLOAD);
        let (_, report) = migrate(&config, |_| Arc::new(()));
        assert!(report.corruptions > 100, "{kind}: {report:?}");
    }
    if kinds("a_dirty_log_that_forgets_is_found_out").contains(&GuestKind::Kvm) {
        let config = config(GuestKind::Kvm, 2, WORKLOAD);
        let (_, report) = migrate(&config, |machine| {
            machine.backend.dirty_log(LogChoice::KvmBitmap, &machine.memory).unwrap().0
        });
        let first = report.first_corruption.expect("KVM does not log the device's writes");
        assert!((0x2_0000..0x3_0000).contains(&first.gpa), "{report:?}");
    }
}

#[test]
fn the_device_s_writes_and_no_others_are_in_the_software_log() {
    let mut machine = Machine::new(config(GuestKind::Process, 1, "idle")).unwrap();
    let log = SoftwareLog::new(&machine.mapped);
    let mut seen = PageSet::for_memory(machine.memory());
    log.start().unwrap();
    machine.heartbeat.run(true);
    let deadline = Instant::now() + PATIENCE;
    while seen.count() < 16 {
        assert!(Instant::now() < deadline);
        log.collect(&mut seen).unwrap();
    }
    let pages: Vec<_> = seen.runs().map(|run| (run.slot, run.first, run.pages)).collect();
    assert_eq!(pages, [(SlotId(0), 0x20, 16)]);
    machine.heartbeat.run(false);
    log.collect(&mut seen).unwrap();
    seen.clear_all();
    std::thread::sleep(Duration::from_millis(20));
    log.collect(&mut seen).unwrap();
    assert!(seen.is_empty(), "a quiet device wrote");
    machine.start().unwrap();
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
fn a_state_that_does_not_fit_is_refused_and_the_machine_stays_new() {
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
    for kind in kinds("a_state_that_does_not_fit_is_refused_and_the_machine_stays_new") {
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
fn the_choice_of_what_runs_the_guest_is_told() {
    let machine = Machine::new(config(GuestKind::Process, 1, "idle")).unwrap();
    assert_eq!(
        (machine.kind(), machine.choice()),
        ("process", "threads of a process, as asked for")
    );
    let machine = Machine::new(config(GuestKind::Auto, 1, "idle")).unwrap();
    match KvmBackend::available() {
        Ok(()) => assert_eq!((machine.kind(), machine.choice()), ("kvm", "/dev/kvm serves")),
        Err(error) => {
            assert_eq!(machine.kind(), "process");
            assert!(machine.choice().contains(&error.to_string()));
        }
    }
}

#[test]
fn a_kvm_log_for_a_guest_without_kvm_is_refused() {
    for dirty_log in [LogChoice::KvmClear, LogChoice::KvmRing] {
        let config = MachineConfig { dirty_log, ..config(GuestKind::Process, 1, "idle") };
        let error = Machine::new(config).unwrap().dirty_log().err().unwrap().to_string();
        assert!(error.contains("dirty-log") && error.contains("use uffd"), "{error}");
    }
}

#[test]
fn nothing_of_a_dropped_machine_stays() {
    for kind in kinds("nothing_of_a_dropped_machine_stays") {
        let machine = started(config(kind, 2, WORKLOAD));
        let mapped = Arc::downgrade(&machine.mapped);
        drop(machine);
        assert!(mapped.upgrade().is_none(), "a thread of {kind} holds the memory");
    }
}

#[test]
fn an_embedded_machine_migrates_and_stays_in_reach() {
    for kind in kinds("an_embedded_machine_migrates_and_stays_in_reach") {
        let source = Machine::shared(config(kind, 2, WORKLOAD)).unwrap();
        lock(&source).start().unwrap();
        wait_for(&lock(&source), "populated", |report| report.populated);
        let mut migrating = MigratingMachine::new(Arc::clone(&source)).unwrap();
        let description = migrating.describe();
        assert_eq!(description.vmm, format!("microvm/{kind}"));
        migrating.pause().unwrap();
        assert_eq!(lock(&source).phase(), "paused", "seen by whoever else has a hand on it");
        let state = migrating.save().unwrap();

        let mut incoming = IncomingMachine::default();
        for _ in 0..2 {
            let memory = incoming.prepare(&description).unwrap();
            assert_eq!(memory.populated().unwrap().count(), 0);
            copy(&migrating.memory().populated().unwrap(), &migrating.memory(), &memory);
            incoming.load(&state).unwrap();
            incoming.discard();
            assert!(incoming.machine.is_none() && incoming.load(&state).is_err());
        }
        let memory = incoming.prepare(&description).unwrap();
        copy(&migrating.memory().populated().unwrap(), &migrating.memory(), &memory);
        incoming.load(&state).unwrap();
        incoming.run().unwrap();
        let target = incoming.machine.take().unwrap();
        let target = lock(&target);
        assert_eq!(target.config().identity, description.identity);
        assert_eq!(check_all(&target).corruptions, 0);
        migrating.resume().unwrap();
        assert!(lock(&source).is_running(), "a migration that failed leaves the source as it was");
    }
}

#[test]
fn an_unexpected_guest_is_refused() {
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
