//! The dirty logs of a machine.

use vmferry_doubles::FilteredLog;
use vmferry_kit::HugePages;
use vmferry_memory::{PAGE_SIZE, PageRun};

use super::*;

#[test]
fn dirty_log_sees_every_write_of_guest_and_device() {
    // Huge pages for both machines of a migration.
    let bytes: u64 = config(GuestKind::Process, 1, WORKLOAD)
        .guest
        .layout()
        .iter()
        .map(|slot| slot.pages * 4096)
        .sum();
    let _pool = HugePages::reserve(2 * bytes / (2 * MIB));
    let logs =
        [LogChoice::Userfaultfd, LogChoice::KvmBitmap, LogChoice::KvmClear, LogChoice::KvmRing];
    for kind in KINDS {
        for dirty_log in logs {
            if kind == GuestKind::Process && dirty_log != LogChoice::Userfaultfd {
                continue;
            }
            let cases = [
                (MemoryKind::Private, WORKLOAD),
                (MemoryKind::Memfd, WORKLOAD),
                (MemoryKind::Thp, WORKLOAD),
                (MemoryKind::Hugetlb, WORKLOAD),
                (MemoryKind::Private, "display read=8 hot=4,rate=100000"),
                (MemoryKind::Memfd, "display"),
            ];
            for (memory_kind, workload) in cases {
                let config = MachineConfig { dirty_log, memory_kind, ..config(kind, 2, workload) };
                let (name, report) = migrate(&config, |machine| machine.dirty_log().unwrap());
                assert_eq!(report.corruptions, 0, "{kind} {name} {memory_kind}: {report:?}");
            }
        }
    }
}

#[test]
fn device_log_sees_every_write_with_every_strategy() {
    for device_log in SoftwareWay::ALL {
        let config =
            MachineConfig { device_log, ..config(GuestKind::Kvm, 1, "ticks hot=4,rate=40000") };
        let (name, report) = migrate(&config, |machine| machine.dirty_log().unwrap());
        assert_eq!(report.corruptions, 0, "{name} {device_log}: {report:?}");
    }
}

#[test]
fn auto_log_depends_on_the_memory_size() {
    for (memory_bytes, dirty_log, expected) in [
        (64 * MIB, LogChoice::Auto, "kvm-clear"),
        (RING_FROM_BYTES - 2 * MIB, LogChoice::Auto, "kvm-clear"),
        (RING_FROM_BYTES, LogChoice::Auto, "kvm-ring"),
        (RING_FROM_BYTES, LogChoice::KvmBitmap, "kvm-bitmap"),
        (64 * MIB, LogChoice::KvmRing, "kvm-ring"),
    ] {
        let mut config = MachineConfig { dirty_log, ..config(GuestKind::Kvm, 1, "idle") };
        config.guest.memory_bytes = memory_bytes;
        let machine = Machine::new(config).unwrap();
        let log = machine.dirty_log().unwrap();
        assert_eq!(log.name(), expected, "{dirty_log} of {} MiB", memory_bytes / MIB);
        log.start().unwrap();
        let mut pages = PageSet::for_memory(machine.memory());
        log.collect(&mut pages).unwrap();
        assert!(pages.is_empty(), "nothing has written to memory");
        log.stop().unwrap();
    }
}

/// The vCPU threads empty their full rings while the log harvests them.
#[test]
fn dirty_ring_that_is_full_loses_nothing() {
    let config = MachineConfig {
        dirty_log: LogChoice::KvmRing,
        ..config(GuestKind::Kvm, 2, "ticks fill=4,incompressible hot=24,random,rate=40000")
    };
    let mut source = Machine::new(config.clone()).unwrap();
    let kvm = KvmConfig {
        vcpus: 2,
        command_line: config.guest.command_line.clone(),
        dirty_ring: DirtyRing::Required(1024),
        ..Default::default()
    };
    let backend = KvmBackend::new(kvm, Arc::clone(&source.mapped)).unwrap();
    let rings = Arc::clone(backend.rings().unwrap());
    source.backend = Box::new(backend);
    let (name, report) = migrate_from(start(source), &config, |machine| {
        // No harvest empties the rings until the guest has filled one, however slow it is: it has
        // 6,144 pages for two rings of 1,024 entries.
        FilteredLog::new(machine.dirty_log().unwrap(), move |_| {
            let deadline = Instant::now() + PATIENCE;
            while rings.full_exits() == 0 {
                assert!(Instant::now() < deadline, "no ring was full");
                std::thread::sleep(Duration::from_millis(1));
            }
        })
    });
    assert_eq!((name.as_str(), report.corruptions), ("kvm-ring", 0), "{report:?}");
}

#[test]
fn ring_log_needs_a_machine_with_rings() {
    let mut machine = Machine::new(config(GuestKind::Kvm, 1, "idle")).unwrap();
    machine.config.dirty_log = LogChoice::KvmRing;
    let error = machine.dirty_log().err().unwrap().to_string();
    assert!(error.contains("dirty-log") && error.contains("without dirty rings"), "{error}");
}

#[test]
fn guest_detects_a_dirty_log_that_misses_writes() {
    for kind in KINDS {
        let config = config(kind, 2, WORKLOAD);
        let (_, report) = migrate(&config, |machine| {
            // All writes to the workload's memory are lost. The log keeps the guest's stacks,
            // because without them the guest may crash before it can report.
            let slot = SlotId(0);
            let first = 16 * MIB / PAGE_SIZE as u64;
            let pages = machine.memory().slot(slot).unwrap().pages() - first;
            FilteredLog::losing(machine.dirty_log().unwrap(), PageRun { slot, first, pages })
        });
        assert!(report.corruptions > 100, "{kind}: {report:?}");
    }
    let config = config(GuestKind::Kvm, 2, WORKLOAD);
    let (_, report) = migrate(&config, |machine| {
        machine.backend.dirty_log(LogChoice::KvmBitmap, &machine.memory).unwrap().log
    });
    let first = report.first_corruption.expect("KVM does not log the device's writes");
    assert!((0x2_0000..0x3_0000).contains(&first.gpa), "{report:?}");
}

#[test]
fn software_log_has_exactly_the_device_writes() {
    let mut machine = Machine::new(config(GuestKind::Process, 1, "idle")).unwrap();
    let log = SoftwareLog::new(&machine.mapped);
    let mut seen = PageSet::for_memory(machine.memory());
    log.start().unwrap();
    machine.heartbeat.resume();
    let deadline = Instant::now() + PATIENCE;
    while seen.count() < 16 {
        assert!(Instant::now() < deadline);
        log.collect(&mut seen).unwrap();
    }
    let pages: Vec<_> = seen.runs().map(|run| (run.slot, run.first, run.pages)).collect();
    assert_eq!(pages, [(SlotId(0), 0x20, 16)]);
    machine.heartbeat.pause();
    // With the marks of a device that was interrupted between choosing a bitmap and marking it.
    log.collect_last(&mut seen).unwrap();
    seen.clear_all();
    std::thread::sleep(Duration::from_millis(20));
    log.collect_last(&mut seen).unwrap();
    assert!(seen.is_empty(), "a paused device wrote");
    machine.start().unwrap();
}

#[test]
fn kvm_log_of_a_process_guest_is_refused() {
    for dirty_log in [LogChoice::KvmClear, LogChoice::KvmRing] {
        let config = MachineConfig { dirty_log, ..config(GuestKind::Process, 1, "idle") };
        let error = Machine::new(config).unwrap().dirty_log().err().unwrap().to_string();
        assert!(error.contains("dirty-log") && error.contains("use uffd"), "{error}");
    }
}
