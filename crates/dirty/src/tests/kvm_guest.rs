//! KVM's logs with a real guest, which writes every page of its memory repeatedly.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vmferry_kit::need_kvm;
use vmferry_kvm_lab::{LabOptions, Machine, WriteLoop};
use vmferry_memory::{MemoryKind, PageSet, SlotId, SlotLayout};

use super::{check, follow, kvm_slots};
use crate::{
    DirtyLog, DirtyLogError, DirtyRings, KvmAdaptiveLog, KvmBitmapLog, KvmClearLog, KvmRingLog,
    UffdLog, enable_dirty_ring, max_ring_entries,
};

const RING: LabOptions = LabOptions { dirty_ring_entries: Some(1024) };

/// A machine with two slots of this many pages together, on KVM.
fn machine(kind: MemoryKind, vcpus: usize, pages: u64, options: LabOptions) -> Machine {
    need_kvm();
    let first = pages / 3;
    let layout = [(0, 0, first), (1, 3 << 30, pages - first)]
        .map(|(slot, gpa, pages)| SlotLayout { slot: SlotId(slot), gpa, pages });
    Machine::new(&layout, kind, vcpus, options).unwrap()
}

/// The log of a machine's rings, with a handler for full rings.
fn ring_log(machine: &Machine, entries: u32) -> (KvmRingLog, Arc<DirtyRings>) {
    let rings = DirtyRings::new(Arc::clone(machine.vm()), entries, kvm_slots(machine)).unwrap();
    let rings = Arc::new(rings);
    for vcpu in 0..machine.vcpus() {
        machine.with_vcpu(vcpu, |vcpu| rings.add_vcpu(vcpu)).unwrap().unwrap();
    }
    let hooked = Arc::clone(&rings);
    machine.on_ring_full(move |_| assert!(hooked.reap_full()));
    (KvmRingLog::new(Arc::clone(&rings)), rings)
}

/// Follows a machine whose vCPUs all write the whole second slot, for `rounds` harvests, each after
/// `writes` writes of each vCPU.
fn follow_loops(machine: &Machine, log: &dyn DirtyLog, rounds: u32, writes: u64) {
    // The first slot is written once, to detect a log that reports pages that were not written.
    machine.write_run(0, SlotId(0), 0, machine.memory().slots()[0].pages()).unwrap();
    let pages = machine.memory().slots()[1].pages();
    let loops: Vec<WriteLoop> = (0..machine.vcpus())
        .map(|vcpu| machine.start_loop(vcpu, SlotId(1), 0, pages).unwrap())
        .collect();
    let mut running = Some(loops);
    let followed = {
        let running = std::cell::RefCell::new(&mut running);
        let wait = || {
            let loops = running.borrow();
            loops.iter().flatten().for_each(|each| each.wait_for(writes));
        };
        let stop = || {
            let loops = running.borrow_mut().take();
            loops.into_iter().flatten().for_each(|each| each.stop().unwrap());
        };
        follow(machine.memory(), log, rounds, wait, stop)
    };
    check(machine.memory(), followed);
}

fn run(kind: MemoryKind, log: impl FnOnce(&Machine) -> Box<dyn DirtyLog>) {
    let machine = machine(kind, 1, 300, LabOptions::default());
    let log = log(&machine);
    follow_loops(&machine, log.as_ref(), 30, 400);
}

#[test]
fn bitmap_log_follows_a_guest() {
    run(MemoryKind::Private, |machine| {
        Box::new(KvmBitmapLog::new(Arc::clone(machine.vm()), kvm_slots(machine)))
    });
}

#[test]
fn clear_log_follows_a_guest() {
    run(MemoryKind::Memfd, |machine| {
        Box::new(KvmClearLog::new(Arc::clone(machine.vm()), kvm_slots(machine)).unwrap())
    });
}

#[test]
fn userfaultfd_follows_a_guest() {
    for kind in [MemoryKind::Private, MemoryKind::Memfd] {
        run(kind, |machine| Box::new(UffdLog::new(machine.memory()).unwrap()));
    }
}

#[test]
fn logs_can_be_used_in_turn_on_one_machine() {
    run(MemoryKind::Private, |machine| {
        let slots = kvm_slots(machine);
        let clear = KvmClearLog::new(Arc::clone(machine.vm()), slots.clone()).unwrap();
        clear.start().unwrap();
        clear.stop().unwrap();
        // If manual clear were still on, the bitmap log would report every page for ever.
        let bitmap = KvmBitmapLog::new(Arc::clone(machine.vm()), slots);
        bitmap.start().unwrap();
        let mut pages = PageSet::for_memory(machine.memory());
        bitmap.collect(&mut pages).unwrap();
        bitmap.stop().unwrap();
        Box::new(bitmap)
    });
}

#[test]
fn adaptive_log_follows_a_guest_that_writes_everything() {
    run(MemoryKind::Private, |machine| Box::new(adaptive_log(machine)));
}

fn adaptive_log(machine: &Machine) -> KvmAdaptiveLog {
    KvmAdaptiveLog::new(Arc::clone(machine.vm()), kvm_slots(machine)).unwrap()
}

/// Pages that were reported but not protected before the change are reported again.
#[test]
fn adaptive_log_loses_nothing_when_it_switches() {
    let machine = machine(MemoryKind::Private, 1, 300, LabOptions::default());
    let log = adaptive_log(&machine);
    let mut pages = PageSet::for_memory(machine.memory());
    let mut harvest = |manual: bool, written: &[u64]| {
        machine.write_pages(0, SlotId(1), written.iter().copied()).unwrap();
        log.set_manual(manual).unwrap();
        pages.clear_all();
        log.read(&mut pages).unwrap();
        assert!(pages.bitmap(SlotId(0)).is_empty());
        let runs = pages.bitmap(SlotId(1)).runs();
        (log.name(), runs.flat_map(|(first, count)| first..first + count).collect::<Vec<_>>())
    };
    let many: Vec<u64> = (0..100).collect();
    log.start().unwrap();
    assert_eq!(harvest(true, &many), ("kvm-clear", many.clone()));
    assert_eq!(harvest(false, &[]), ("kvm-bitmap", many.clone()), "reported, not protected");
    assert_eq!(harvest(false, &[3, 150]), ("kvm-bitmap", vec![3, 150]));
    log.rearm(SlotId(1), 0, &[1 << 3]).unwrap();
    assert_eq!(harvest(true, &[4, 151]), ("kvm-clear", vec![4, 151]));
    log.rearm(SlotId(1), 0, &[1 << 4]).unwrap();
    assert_eq!(harvest(true, &[5]), ("kvm-clear", vec![5, 151]), "151 was not read yet");
    log.stop().unwrap();
    // The next start begins from a clean state.
    log.set_manual(false).unwrap();
    log.start().unwrap();
    assert_eq!(harvest(true, &many), ("kvm-clear", many.clone()));
    log.stop().unwrap();
}

#[test]
fn ring_log_follows_two_vcpus_that_fill_it() {
    for kind in [MemoryKind::Private, MemoryKind::Memfd] {
        let machine = machine(kind, 2, 4500, RING);
        let (log, rings) = ring_log(&machine, 1024);
        follow_loops(&machine, &log, 6, 5000);
        assert!(rings.full_exits() > 0, "3,000 pages fill a ring of 1,024 entries");
        eprintln!("{} full exits", rings.full_exits());
    }
}

/// Few pages, written continuously: nearly every harvest has writes before, during and after it.
#[test]
fn ring_log_loses_no_write_between_harvest_and_reset() {
    let machine = machine(MemoryKind::Private, 2, 24, RING);
    let (log, _) = ring_log(&machine, 1024);
    for _ in 0..2 {
        follow_loops(&machine, &log, 200, 1);
    }
}

/// Linux 6.17 and later let a signal interrupt a reset. Up to 64 pages are then left unprotected
/// for ever: no later harvest reports them.
#[test]
fn signals_during_the_reset_lose_nothing() {
    const PAGES: u64 = 6000;
    let options = LabOptions { dirty_ring_entries: Some(8192) };
    let machine = machine(MemoryKind::Private, 1, PAGES, options);
    let (log, rings) = ring_log(&machine, 8192);
    // The lab's own signal has a handler once a loop has been started.
    machine.start_loop(0, SlotId(0), 0, 1).unwrap().stop().unwrap();
    // SAFETY: the call has no preconditions.
    let target = unsafe { libc::pthread_self() };
    let (armed, done) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                // No yield: the reset takes less time than being scheduled again.
                if !armed.load(Ordering::Acquire) {
                    std::hint::spin_loop();
                    continue;
                }
                // SAFETY: the target thread waits for this one at the end of the scope, so it
                // exists. The signal's handler does nothing.
                unsafe { libc::pthread_kill(target, libc::SIGRTMIN()) };
                (0..500).for_each(|_| std::hint::spin_loop());
            }
        });
        let _end = EndOf(&done);
        let mut pages = PageSet::for_memory(machine.memory());
        log.start().unwrap();
        for round in 0..15 {
            for slot in machine.slots() {
                machine.write_run(0, slot.slot, 0, slot.bytes / 4096).unwrap();
            }
            pages.clear_all();
            armed.store(true, Ordering::Release);
            log.collect(&mut pages).unwrap();
            armed.store(false, Ordering::Release);
            assert_eq!(pages.count(), PAGES, "round {round}");
        }
        assert_eq!(rings.full_exits(), 0, "each reset is of all pages");
    });
}

/// Ends a thread even if the test fails.
struct EndOf<'a>(&'a AtomicBool);

impl Drop for EndOf<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[test]
fn userfaultfd_follows_a_machine_with_rings() {
    let machine = machine(MemoryKind::Private, 1, 300, RING);
    follow_loops(&machine, &UffdLog::new(machine.memory()).unwrap(), 30, 400);
}

/// Exactly the written pages are reported, each once, whichever thread harvested them.
#[test]
fn collect_returns_what_a_vcpu_thread_harvested() {
    let machine = machine(MemoryKind::Private, 2, 4500, RING);
    let (log, rings) = ring_log(&machine, 1024);
    let mut pages = PageSet::for_memory(machine.memory());
    assert!(matches!(log.collect(&mut pages), Err(DirtyLogError::NotStarted { .. })));
    machine.write_run(0, SlotId(0), 0, 100).unwrap();
    for round in 1..4 {
        log.start().unwrap();
        machine.write_run(1, SlotId(1), 0, 3000).unwrap();
        assert!(rings.full_exits() >= 2 * round, "{} full exits", rings.full_exits());
        machine.write_pages(0, SlotId(0), (0..1500).step_by(100)).unwrap();
        // Again, on the other vCPU.
        machine.write_pages(1, SlotId(0), [300, 500]).unwrap();
        log.collect(&mut pages).unwrap();
        assert_eq!(pages.bitmap(SlotId(1)).runs().collect::<Vec<_>>(), [(0, 3000)]);
        let scattered: Vec<_> = (0..1500).step_by(100).map(|page| (page, 1)).collect();
        assert_eq!(pages.bitmap(SlotId(0)).runs().collect::<Vec<_>>(), scattered);
        pages.clear_all();
        log.collect(&mut pages).unwrap();
        assert!(pages.is_empty(), "nothing was written since");
        machine.write_pages(0, SlotId(1), [2999]).unwrap();
        log.collect(&mut pages).unwrap();
        assert_eq!(pages.count(), 1);
        pages.clear_all();
        // Pages that are not collected are not reported after the next start, and do not fill the
        // ring.
        machine.write_run(0, SlotId(1), 0, 400).unwrap();
        log.stop().unwrap();
        log.stop().unwrap();
        let before = rings.full_exits();
        machine.write_run(0, SlotId(1), 0, 3000).unwrap();
        assert_eq!(rings.full_exits(), before, "a log that has stopped costs nothing");
    }
}

#[test]
fn machine_has_either_rings_or_bitmaps() {
    let with = machine(MemoryKind::Private, 1, 30, RING);
    let unavailable = |error: DirtyLogError, advice: &str| {
        let is = matches!(error, DirtyLogError::Unavailable { .. });
        assert!(is && error.to_string().contains(advice), "{error}");
    };
    let (vm, slots) = (with.vm(), kvm_slots(&with));
    let bitmap = KvmBitmapLog::new(Arc::clone(vm), slots.clone());
    unavailable(bitmap.start().unwrap_err(), "use the dirty log `ring` or `uffd`");
    let clear = KvmClearLog::new(Arc::clone(vm), slots.clone());
    unavailable(clear.err().unwrap(), "use the dirty log `ring` or `uffd`");
    unavailable(enable_dirty_ring(vm, 1024).unwrap_err(), "before any vCPU is made");

    // A length that differs from the rings', which the kernel itself would not detect.
    for (entries, errno) in [(2048, libc::EFAULT), (4096, libc::EFAULT)] {
        let rings = DirtyRings::new(Arc::clone(vm), entries, slots.clone()).unwrap();
        let error = with.with_vcpu(0, |vcpu| rings.add_vcpu(vcpu)).unwrap().unwrap_err();
        assert!(
            matches!(&error, DirtyLogError::Ring { source, .. }
                if source.raw_os_error() == Some(errno)),
            "{error:?}"
        );
    }
    let log = KvmRingLog::new(Arc::new(DirtyRings::new(Arc::clone(vm), 1024, slots).unwrap()));
    unavailable(log.start().unwrap_err(), "the ring of no vCPU has been mapped");

    let options = LabOptions { dirty_ring_entries: Some(4096) };
    let longer = machine(MemoryKind::Private, 1, 30, options);
    let rings = DirtyRings::new(Arc::clone(longer.vm()), 1024, kvm_slots(&longer)).unwrap();
    let error = longer.with_vcpu(0, |vcpu| rings.add_vcpu(vcpu)).unwrap().unwrap_err();
    assert!(
        matches!(&error, DirtyLogError::Ring { source, .. }
            if source.raw_os_error() == Some(libc::EFBIG)),
        "{error:?}"
    );

    let without = machine(MemoryKind::Private, 1, 30, LabOptions::default());
    let rings = DirtyRings::new(Arc::clone(without.vm()), 1024, kvm_slots(&without));
    unavailable(rings.unwrap_err(), "use the dirty log `clear`, `bitmap` or `uffd`");
    let max = max_ring_entries(without.vm()).unwrap();
    for entries in [0, 512, 1000, 1025, 2 * max, u32::MAX] {
        unavailable(
            enable_dirty_ring(without.vm(), entries).unwrap_err(),
            "power of two from 1024",
        );
    }
    unavailable(enable_dirty_ring(without.vm(), max).unwrap_err(), "before any vCPU is made");
}

#[test]
fn bits_beyond_a_slot_are_refused() {
    let machine = machine(MemoryKind::Private, 1, 750, LabOptions::default());
    let log = KvmClearLog::new(Arc::clone(machine.vm()), kvm_slots(&machine)).unwrap();
    log.start().unwrap();
    log.rearm(SlotId(0), 3, &[u64::MAX]).unwrap();
    for (first_word, words) in [(4, 1), (3, 2), (usize::MAX, 1)] {
        let error = log.rearm(SlotId(0), first_word, &vec![1; words]).unwrap_err();
        assert!(matches!(error, DirtyLogError::OutOfSlot { .. }), "{error}");
    }
    assert!(matches!(log.rearm(SlotId(9), 0, &[1]), Err(DirtyLogError::NoSuchSlot { .. })));
}
