//! The guest writes exactly the requested pages.

use vmferry_kit::need_kvm;
use vmferry_memory::PageSet;

use super::*;

fn layout() -> Vec<SlotLayout> {
    [(0, 0x1000, 3000), (1, 3 << 30, 700), (2, 600 << 30, 5)]
        .map(|(slot, gpa, pages)| SlotLayout { slot: SlotId(slot), gpa, pages })
        .to_vec()
}

fn machine(vcpus: usize) -> Machine {
    Machine::new(&layout(), MemoryKind::Private, vcpus, LabOptions::default()).unwrap()
}

fn word(machine: &Machine, slot: u16, page: u64, vcpu: u64) -> u64 {
    let gpa = layout()[usize::from(slot)].gpa + page * PAGE_SIZE as u64 + 8 * vcpu;
    let mut bytes = [0; 8];
    machine.memory().read_at(gpa, &mut bytes).unwrap();
    u64::from_le_bytes(bytes)
}

#[test]
fn scattered_pages_of_each_slot_are_written_once_each() {
    need_kvm();
    let machine = machine(2);
    let mut expected = PageSet::for_memory(machine.memory());
    for (slot, pages) in [(0, vec![0, 7, 2999, 64]), (1, vec![699]), (2, vec![4, 0])] {
        machine.write_pages(1, SlotId(slot), pages.iter().copied()).unwrap();
        for page in pages {
            assert_eq!((word(&machine, slot, page, 1), word(&machine, slot, page, 0)), (1, 0));
            expected.bitmap_mut(SlotId(slot)).set(page);
        }
    }
    assert_eq!(machine.memory().populated().unwrap(), expected);
    // Longer than one list.
    let many = (0..LIST_ENTRIES as u64 + 10).map(|index| index % 3000);
    machine.write_pages(0, SlotId(0), many).unwrap();
    assert_eq!((word(&machine, 0, 0, 0), word(&machine, 0, 2999, 0)), (11, 10));
    machine.write_pages(0, SlotId(0), []).unwrap();
}

#[test]
fn runs_and_loops_write_their_range() {
    need_kvm();
    let machine = machine(8);
    machine.write_run(0, SlotId(0), 10, 20).unwrap();
    machine.write_run(0, SlotId(0), 10, 0).unwrap();
    machine.write_run(7, SlotId(1), 0, 700).unwrap();
    let written = |slot: u16| {
        let populated = machine.memory().populated().unwrap();
        populated.bitmap(SlotId(slot)).runs().collect::<Vec<_>>()
    };
    assert_eq!((written(0), written(1), written(2)), (vec![(10, 20)], vec![(0, 700)], vec![]));
    for _ in 0..3 {
        let loops: Vec<_> =
            (0..8).map(|vcpu| machine.start_loop(vcpu, SlotId(2), 1, 3).unwrap()).collect();
        loops.iter().for_each(|each| each.wait_for(100));
        assert!(matches!(machine.write_run(3, SlotId(0), 0, 1), Err(LabError::Busy { vcpu: 3 })));
        loops.into_iter().for_each(|each| each.stop().unwrap());
    }
    assert_eq!(written(2), [(1, 3)]);
    for vcpu in 0..8 {
        let sum: u64 = (1..4).map(|page| word(&machine, 2, page, vcpu)).sum();
        let counted = machine.shared.written(vcpu as usize);
        // Each of the three loops may have been stopped between the page and the counter.
        assert!((counted..=counted + 3).contains(&sum), "{sum} words, {counted} counted");
    }
}

#[test]
fn write_outside_the_layout_is_refused() {
    need_kvm();
    let machine = machine(1);
    assert!(matches!(machine.write_pages(0, SlotId(2), [5]), Err(LabError::Memory(_))));
    assert!(matches!(machine.write_run(0, SlotId(2), 4, 2), Err(LabError::Memory(_))));
    assert!(matches!(machine.start_loop(0, SlotId(9), 0, 1), Err(LabError::Memory(_))));
    assert!(matches!(machine.write_pages(1, SlotId(0), [0]), Err(LabError::NoSuchVcpu { .. })));
    let new = |vcpus| Machine::new(&layout(), MemoryKind::Private, vcpus, LabOptions::default());
    assert!(matches!(new(0), Err(LabError::Vcpus { .. })));
    assert!(matches!(new(9), Err(LabError::Vcpus { .. })));
    let high = [SlotLayout { slot: SlotId(0), gpa: 1 << 47, pages: 1 }];
    let high = Machine::new(&high, MemoryKind::Private, 1, LabOptions::default());
    assert!(matches!(high, Err(LabError::TooHigh { .. })));
}

#[test]
fn full_ring_without_a_hook_is_an_error() {
    need_kvm();
    let options = LabOptions { dirty_ring_entries: Some(1024) };
    let machine = match Machine::new(&layout(), MemoryKind::Private, 1, options) {
        Err(LabError::NoDirtyRing) => {
            panic!("this test needs a KVM with dirty rings");
        }
        machine => machine.unwrap(),
    };
    // Without logging, the ring stays empty.
    machine.write_run(0, SlotId(0), 0, 3000).unwrap();
    let slot = machine.slots()[0];
    let region = kvm_userspace_memory_region {
        slot: slot.kvm_slot,
        flags: kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES,
        guest_phys_addr: slot.gpa,
        memory_size: slot.bytes,
        userspace_addr: slot.host_address,
    };
    // SAFETY: the same region with another flag.
    unsafe { machine.vm().set_user_memory_region(region) }.unwrap();
    let error = machine.write_run(0, SlotId(0), 0, 3000).unwrap_err();
    assert!(matches!(error, LabError::RingFull { vcpu: 0 }), "{error}");
    assert_eq!(machine.ring_full_exits(), 1);
}
