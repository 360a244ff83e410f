//! Trap: what happens to threads that wait if the descriptor's process dies.

use vmferry_faults::{FaultDescriptor, FaultRanges};
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE};

use crate::child::{Other, Role};
use crate::support::{Contents, PAGE, answer, memory, next_fault, page, pending, register};

const PAGES: u64 = 64;

fn content(memory: &GuestMemory, first: u64) -> [u8; PAGE_SIZE] {
    let mut content = [1; PAGE_SIZE];
    memory.copy_out(page(first), &mut content).unwrap();
    content
}

/// The hazard: nobody is told, and the guest computes with zeros.
#[test]
fn missing_page_reads_as_zeros_after_the_last_descriptor_is_closed() {
    for kind in [MemoryKind::Private, MemoryKind::Memfd] {
        let memory = memory(PAGES, kind);
        let ranges = register(&memory, 1);
        let mut reader = Other::with_descriptor(Role::Reader, &ranges, 1);
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| content(&memory, 5));
            reader.said("READ");
            assert!(!thread.is_finished());
            // Now the other process has the last descriptor, and dies.
            drop(ranges);
            reader.kill();
            assert_eq!(thread.join().unwrap(), [0; PAGE_SIZE]);
        });
        assert_eq!(content(&memory, 6), [0; PAGE_SIZE]);
    }
}

/// The way out: a duplicate in the process that faults. The fault that the dead process had read
/// is reported again after a wake-up, and not before.
#[test]
fn duplicate_in_the_faulting_process_keeps_faults_for_a_successor() {
    let contents = Contents::of(2);
    for kind in [MemoryKind::Private, MemoryKind::Memfd] {
        let memory = memory(PAGES, kind);
        let ranges = register(&memory, 1);
        let mut reader = Other::with_descriptor(Role::Reader, &ranges, 1);
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| content(&memory, 5));
            let address = reader.said("READ")[0];
            reader.kill();
            assert_eq!(pending(&ranges), 0, "a fault is reported once");
            ranges.wake_all().unwrap();
            assert_eq!(next_fault(&ranges, 0), address);
            assert!(!thread.is_finished());
            answer(&ranges, address, contents);
            assert_eq!(thread.join().unwrap(), contents.page(5));
        });
    }
}

#[test]
fn clone_of_a_descriptor_reports_and_places() {
    let memory = memory(PAGES, MemoryKind::Memfd);
    let descriptor = FaultDescriptor::open(PAGE).unwrap();
    let ioctls = descriptor.register_slot(&memory.slots()[0], 0..PAGES).unwrap();
    assert!(ioctls.copy() && ioctls.wake() && ioctls.zero_page());
    let clone = descriptor.try_clone().unwrap();
    drop(descriptor);
    let start = memory.slots()[0].host_address() as u64;
    let range = vmferry_faults::FaultRange {
        slot: crate::support::SLOT,
        first_page: 0,
        addresses: start..start + PAGES * PAGE,
        share: 0,
        descriptor: clone,
    };
    let ranges = FaultRanges::of(vec![range]).unwrap();
    let contents = Contents::of(3);
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| content(&memory, 9));
        let address = next_fault(&ranges, 0);
        assert_eq!(address, start + 9 * PAGE);
        answer(&ranges, address, contents);
        assert_eq!(thread.join().unwrap(), contents.page(9));
    });
}

/// A range that is unregistered lets its threads continue with zeros.
#[test]
fn unregistered_page_reads_as_zeros() {
    let memory = memory(PAGES, MemoryKind::Private);
    let ranges = register(&memory, 1);
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| content(&memory, 5));
        next_fault(&ranges, 0);
        ranges.unregister().unwrap();
        assert_eq!(thread.join().unwrap(), [0; PAGE_SIZE]);
    });
}
