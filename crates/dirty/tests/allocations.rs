//! A harvest does not allocate, with any log, on any kind of memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress};
use vmferry_dirty::{
    DirtyBitmap, DirtyLog, DirtyRings, KvmAdaptiveLog, KvmBitmapLog, KvmClearLog, KvmRingLog,
    KvmSlot, SoftwareLog, SoftwareWay, UffdLog,
};
use vmferry_kit::need_kvm;
use vmferry_kvm_lab::{LabOptions, Machine};
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, PageSet, SlotId, SlotLayout, map_slots};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: all calls are forwarded to the system's allocator; counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller upholds the contract of the function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above; `pointer` came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Harvests after each of several writes. Returns the number of allocations of each harvest.
fn allocations(log: &dyn DirtyLog, memory: &GuestMemory, write: impl Fn(u64)) -> Vec<u64> {
    log.start().unwrap();
    let mut pages = PageSet::for_memory(memory);
    let mut made = Vec::new();
    for round in 0..4 {
        // More runs than one system call returns, and blocks that had no data before.
        let written = PAGES / 4 * round;
        (0..written).step_by(2).for_each(&write);
        pages.clear_all();
        let before = ALLOCATIONS.with(Cell::get);
        if round < 3 {
            log.collect(&mut pages).unwrap();
        } else {
            log.collect_last(&mut pages).unwrap();
        }
        made.push(ALLOCATIONS.with(Cell::get) - before);
        assert_eq!(pages.count(), PAGES / 8 * round, "{}", log.name());
        for (slot, bitmap) in pages.iter() {
            log.rearm(slot, 0, bitmap.words()).unwrap();
        }
    }
    log.stop().unwrap();
    made
}

const PAGES: u64 = 6000;
const LAYOUT: [SlotLayout; 1] = [SlotLayout { slot: SlotId(0), gpa: 0, pages: PAGES }];

#[test]
fn userfaultfd_harvest_allocates_nothing() {
    for kind in [MemoryKind::Private, MemoryKind::Memfd] {
        let memory = GuestMemory::allocate(&LAYOUT, kind).unwrap();
        let log = UffdLog::new(&memory).expect("this test needs userfaultfd");
        let write = |page: u64| memory.write_at(page * PAGE_SIZE as u64, &[1]).unwrap();
        (0..PAGES / 3).for_each(write);
        assert_eq!(allocations(&log, &memory, write), [0; 4], "{kind}");
    }
}

#[test]
fn software_harvest_allocates_nothing_except_get_org() {
    for way in SoftwareWay::ALL {
        let mapped = map_slots::<DirtyBitmap>(&LAYOUT, MemoryKind::Private).unwrap();
        let memory = GuestMemory::from_vm_memory(&mapped).unwrap();
        let log = SoftwareLog::in_way(&mapped, way);
        let made = allocations(&log, &memory, |page| {
            mapped.write_obj(1_u8, GuestAddress(page * PAGE_SIZE as u64)).unwrap();
        });
        if way == SoftwareWay::GetOrg {
            assert!(made.iter().all(|made| *made > 0), "the count would see it: {made:?}");
        } else {
            assert_eq!(made, [0; 4], "{way}");
        }
    }
}

#[test]
fn kvm_harvest_allocates_nothing() {
    need_kvm();
    for log in ["bitmap", "clear", "adaptive", "ring"] {
        let ring = (log == "ring").then_some(8192);
        let options = LabOptions { dirty_ring_entries: ring };
        let machine = Machine::new(&LAYOUT, MemoryKind::Private, 1, options).unwrap();
        let slots = machine.slots().iter().map(|slot| KvmSlot {
            slot: slot.slot,
            kvm_slot: slot.kvm_slot,
            gpa: slot.gpa,
            bytes: slot.bytes,
            host_address: slot.host_address,
        });
        let (vm, slots) = (Arc::clone(machine.vm()), slots.collect());
        let log: Box<dyn DirtyLog> = match log {
            "bitmap" => Box::new(KvmBitmapLog::new(vm, slots)),
            "clear" => Box::new(KvmClearLog::new(vm, slots).unwrap()),
            "adaptive" => Box::new(KvmAdaptiveLog::new(vm, slots).unwrap()),
            _ => {
                let rings = DirtyRings::new(vm, 8192, slots).unwrap();
                machine.with_vcpu(0, |vcpu| rings.add_vcpu(vcpu)).unwrap().unwrap();
                Box::new(KvmRingLog::new(Arc::new(rings)))
            }
        };
        let write = |page| machine.write_run(0, SlotId(0), page, 1).unwrap();
        assert_eq!(allocations(log.as_ref(), machine.memory(), write), [0; 4], "{}", log.name());
    }
}
