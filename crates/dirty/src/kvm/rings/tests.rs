//! Rings that this process fills itself, and failures that no guest causes.

use proptest::prelude::*;
use vmferry_kit::need_kvm;
use vmferry_kvm_lab::{LabOptions, Machine};
use vmferry_memory::MemoryKind;

use super::*;
use crate::{DirtyLog, KvmRingLog};

fn slot(slot: u16, kvm_slot: u32, pages: u64) -> KvmSlot {
    KvmSlot { slot: SlotId(slot), kvm_slot, gpa: 0, bytes: pages * 4096, host_address: 0 }
}

/// Resets up to `limit` harvested entries, as the kernel does. Returns their number.
fn reset(entries: &[DirtyGfn], next: &mut usize, limit: usize) -> usize {
    for count in 0..limit {
        if !entries[*next].is_harvested() {
            return count;
        }
        entries[*next].reset();
        *next = (*next + 1) % entries.len();
    }
    limit
}

proptest! {
    #[test]
    fn ring_entries_are_harvested_once_in_order_after_any_reset(
        steps in prop::collection::vec((0_usize..20, 0_usize..20), 1..60)
    ) {
        let memory = RingMemory::anonymous(16);
        let entries = memory.entries();
        let (mut pushed, mut unreset, mut next, mut reset_next) = (0_u64, 0_usize, 0, 0);
        let mut found = Vec::new();
        for (push, limit) in steps {
            // The kernel lets the vCPU enter the guest only while there is room.
            for _ in 0..push.min(entries.len() - unreset) {
                entries[pushed as usize % 16].push(7, pushed);
                (pushed, unreset) = (pushed + 1, unreset + 1);
            }
            harvest(entries, &mut next, |slot, page| found.push((slot, page)));
            unreset -= reset(entries, &mut reset_next, limit);
            let last = next.checked_sub(1).unwrap_or(15);
            prop_assert_eq!(entries[last].is_harvested(), unreset > 0);
        }
        prop_assert_eq!(found, (0..pushed).map(|page| (7, page)).collect::<Vec<_>>());
    }
}

#[test]
fn repeated_entries_count_once_in_their_own_slot() {
    let slots = [slot(0, 3, 10), slot(2, 0, 100)];
    let mut pages = PageSet::for_layout(&layout(&slots));
    let mut last = 0;
    for (kvm_slot, page) in [(3, 9), (0, 99), (0, 99), (3, 9), (3, 0), (0, 9)] {
        add(&slots, &mut last, &mut pages, kvm_slot, page).unwrap();
    }
    let runs: Vec<_> = pages.runs().map(|run| (run.slot.0, run.first, run.pages)).collect();
    assert_eq!(runs, [(0, 0, 1), (0, 9, 1), (2, 9, 1), (2, 99, 1)]);
}

#[test]
fn error_names_an_entry_outside_the_logged_pages() {
    let slots = [slot(0, 3, 10)];
    let mut pages = PageSet::for_layout(&layout(&slots));
    for (kvm_slot, page, expected) in [
        (4, 1, "vCPU 5 names page 0x1 of KVM's slot 4, which the log does not have"),
        // The same slot in another address space.
        (3 | 1 << 16, 1, "of KVM's slot 65539, which the log does not have"),
        (3, 10, "names page 0xa of KVM's slot 3, which is beyond the end of slot 0"),
        (3, u64::MAX, "which is beyond the end of slot 0"),
    ] {
        let slot = add(&slots, &mut 0, &mut pages, kvm_slot, page).unwrap_err();
        let error = Failure::Entry { vcpu: 5, kvm_slot, page, slot }.error().to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert!(pages.is_empty());
}

/// A machine with two slots and small rings, of which the first `logged` are logged.
fn rings(logged: usize) -> (Machine, Arc<DirtyRings>) {
    need_kvm();
    let layout = [(0, 0, 3000), (1, 1 << 30, 500)].map(|(slot, gpa, pages)| SlotLayout {
        slot: SlotId(slot),
        gpa,
        pages,
    });
    let options = LabOptions { dirty_ring_entries: Some(1024) };
    let machine = Machine::new(&layout, MemoryKind::Private, 1, options).unwrap();
    let slots = crate::tests::kvm_slots(&machine)[..logged].to_vec();
    let rings = Arc::new(DirtyRings::new(Arc::clone(machine.vm()), 1024, slots).unwrap());
    machine.with_vcpu(0, |vcpu| rings.add_vcpu(vcpu)).unwrap().unwrap();
    (machine, rings)
}

#[test]
fn foreign_entry_fails_every_collect_until_the_next_start() {
    let (machine, rings) = rings(1);
    let log = KvmRingLog::new(Arc::clone(&rings));
    log.start().unwrap();
    let foreign = crate::tests::kvm_slots(&machine)[1];
    ioctl::set_logging(machine.vm(), &foreign, true).unwrap();
    machine.write_pages(0, SlotId(0), [1, 2]).unwrap();
    machine.write_pages(0, SlotId(1), [3]).unwrap();
    let mut pages = PageSet::for_memory(machine.memory());
    for _ in 0..2 {
        let error = log.collect(&mut pages).unwrap_err();
        assert!(
            matches!(error, DirtyLogError::RingEntry { vcpu: 0, kvm_slot, page: 3, .. }
                if kvm_slot == foreign.kvm_slot),
            "{error}"
        );
    }
    ioctl::set_logging(machine.vm(), &foreign, false).unwrap();
    log.stop().unwrap();
    log.start().unwrap();
    machine.write_pages(0, SlotId(0), [7]).unwrap();
    pages.clear_all();
    log.collect(&mut pages).unwrap();
    assert_eq!(pages.bitmap(SlotId(0)).runs().collect::<Vec<_>>(), [(7, 1)]);
}

/// A vCPU thread cannot make room: the guest continues to write without a log, and the log reports
/// it.
#[test]
fn failed_ring_reset_ends_logging_but_not_the_guest() {
    let (machine, rings) = rings(2);
    let log = KvmRingLog::new(Arc::clone(&rings));
    log.start().unwrap();
    let (hooked, tries) = (Arc::clone(&rings), AtomicU64::new(0));
    machine.on_ring_full(move |_| {
        // As if KVM recovered the second time.
        let refuse: Reset = |_| Err(io::Error::from_raw_os_error(libc::ENOMEM));
        match tries.fetch_add(1, Ordering::Relaxed) {
            0 => assert!(!hooked.make_room(refuse)),
            _ => assert!(hooked.reap_full()),
        }
    });
    machine.write_run(0, SlotId(0), 0, 3000).unwrap();
    machine.write_run(0, SlotId(0), 0, 3000).unwrap();
    assert_eq!(machine.ring_full_exits(), 2, "nothing goes into the ring any more");
    let mut pages = PageSet::for_memory(machine.memory());
    for _ in 0..2 {
        let error = log.collect(&mut pages).unwrap_err();
        assert!(error.to_string().contains("protect the pages again"), "{error}");
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains("memory"), "{source}");
    }
    log.stop().unwrap();
    assert!(matches!(log.collect(&mut pages), Err(DirtyLogError::NotStarted { .. })));
    log.start().unwrap();
    pages.clear_all();
    machine.write_pages(0, SlotId(1), [499]).unwrap();
    log.collect(&mut pages).unwrap();
    assert_eq!(pages.count(), 1);
}

#[test]
fn short_ring_reset_is_an_error() {
    let (machine, rings) = rings(2);
    KvmRingLog::new(Arc::clone(&rings)).start().unwrap();
    machine.write_pages(0, SlotId(0), 0..10).unwrap();
    assert!(rings.make_room(|_| Ok(())), "what KVM has not reset it may reset yet");
    let mut pages = PageSet::for_memory(machine.memory());
    let error = rings.state().collect(rings.slots(), &mut pages).unwrap_err();
    assert!(matches!(&error, DirtyLogError::Ring { source, .. }
        if source.kind() == io::ErrorKind::Interrupted));
}
