//! What is refused, and with which error.

use std::error::Error;

use rustix::thread::set_thread_res_uid;
use vmferry_faults::{FaultDescriptor, FaultError, FaultRange, FaultRanges, Remedy, Wake};
use vmferry_memory::userfaultfd::{FaultOrigin, create};
use vmferry_memory::{MemoryKind, PAGE_SIZE, PageRun, SlotId};

use crate::support::{PAGE, SLOT, memory, page, populated, register, reserve_huge_pages};

const PAGES: u64 = 64;

/// An ordinary user: the thread gives its privileges away.
#[test]
fn user_without_permission_gets_a_remedy() {
    let setting = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap();
    assert_eq!(setting.trim(), "0", "this test needs vm.unprivileged_userfaultfd=0");
    let opened = std::thread::spawn(|| {
        let nobody = rustix::fs::Uid::from_raw(65534);
        set_thread_res_uid(nobody, nobody, nobody).expect("this test needs root");
        FaultDescriptor::open(PAGE)
    });
    let error = opened.join().unwrap().unwrap_err();
    let permit = matches!(error, FaultError::Unavailable { remedy: Remedy::Permit, .. });
    assert!(permit, "{error}");
    let text = error.to_string();
    assert!(text.contains("/dev/userfaultfd (Permission denied"), "{text}");
    assert!(error.source().is_some_and(|cause| cause.to_string().contains("not permitted")));
}

#[test]
fn range_of_another_userfaultfd_is_refused() {
    let memory = memory(PAGES, MemoryKind::Memfd);
    let _first = register(&memory, 1);
    let error = FaultRanges::register(&memory, 1).unwrap_err();
    assert!(error.to_string().contains("another userfaultfd"), "{error}");
}

#[test]
fn range_without_a_mapping_is_refused() {
    let descriptor = FaultDescriptor::open(PAGE).unwrap();
    // SAFETY: nothing is mapped below `vm.mmap_min_addr`.
    let error = unsafe { descriptor.register_missing(&(0x1000..0x3000)) }.unwrap_err();
    assert!(error.to_string().contains("0x1000..0x3000 could not be registered"), "{error}");
}

#[test]
fn page_outside_a_registered_range_is_refused() {
    let memory = memory(PAGES, MemoryKind::Memfd);
    let descriptor = FaultDescriptor::open(PAGE).unwrap();
    descriptor.register_slot(&memory.slots()[0], 0..8).unwrap();
    let start = memory.slots()[0].host_address() as u64;
    let error = descriptor.place(start + 8 * PAGE, &[1; PAGE_SIZE], Wake::Now).unwrap_err();
    let expected = start + 8 * PAGE;
    assert!(matches!(error, FaultError::NotRegistered { at } if at == expected), "{error}");
    let error = descriptor.register_slot(&memory.slots()[0], 60..PAGES + 1).unwrap_err();
    assert!(matches!(error, FaultError::OutOfSlot { length: PAGES, .. }), "{error}");
    // A batch that leaves the range is refused too, and places nothing there.
    let batch = [1; 4 * PAGE_SIZE];
    assert!(descriptor.place(start + 6 * PAGE, &batch, Wake::Now).is_err());
    assert!(populated(&memory).iter().all(|(first, pages)| first + pages <= 8));
}

#[test]
fn page_of_a_range_that_was_unregistered_is_refused() {
    let memory = memory(PAGES, MemoryKind::Private);
    let ranges = register(&memory, 1);
    ranges.unregister().unwrap();
    let error = ranges.place(page(5), &[1; PAGE_SIZE], Wake::Now).unwrap_err();
    assert!(matches!(error, FaultError::NotRegistered { .. }), "{error}");
}

#[test]
fn part_of_a_page_is_refused() {
    let memory = memory(PAGES, MemoryKind::Memfd);
    let ranges = register(&memory, 1);
    let start = ranges.ranges()[0].addresses.start;
    let descriptor = &ranges.ranges()[0].descriptor;
    for (at, bytes) in [(start, 100), (start + 8, PAGE_SIZE), (start, 0)] {
        let error = descriptor.place(at, &vec![1; bytes], Wake::Now).unwrap_err();
        assert!(matches!(error, FaultError::Unit { page_bytes: 4096, .. }), "{error}");
    }
    let error = descriptor.place_zeros(&(start..start + 100), Wake::Now).unwrap_err();
    assert!(matches!(error, FaultError::Unit { .. }), "{error}");
    for page_bytes in [0, 1000, 12288] {
        let error = FaultDescriptor::open(page_bytes).unwrap_err();
        assert!(matches!(error, FaultError::PageSize { .. }), "{error}");
    }
}

#[test]
fn part_of_a_reserved_huge_page_is_refused() {
    let _pool = reserve_huge_pages(2);
    let memory = memory(2 * 512, MemoryKind::Hugetlb);
    let slot = &memory.slots()[0];
    let small = FaultDescriptor::open(PAGE).unwrap();
    let error = small.register_slot(slot, 0..2 * 512).unwrap_err();
    assert!(matches!(error, FaultError::HugePages { .. }), "{error}");
    // Nothing is registered: another descriptor can be.
    let ranges = register(&memory, 1);
    let error = ranges.place(page(512), &[1; PAGE_SIZE], Wake::Now).unwrap_err();
    assert!(error.to_string().contains("no range of whole pages of 2097152 bytes"), "{error}");
}

#[test]
fn handshake_is_made_once() {
    let descriptor = FaultDescriptor::open(PAGE).unwrap();
    let error = FaultDescriptor::set_up(descriptor.into(), PAGE).unwrap_err();
    assert!(matches!(error, FaultError::SetUp { .. }), "{error}");
    // Without one the descriptor can't be read.
    let userfaultfd = create(FaultOrigin::UserAndKernel).unwrap();
    let descriptor = FaultDescriptor::adopt(userfaultfd, PAGE).unwrap();
    assert!(descriptor.read_faults(&mut Vec::new()).is_err());
    FaultDescriptor::set_up(descriptor.into(), PAGE).unwrap();
}

#[test]
fn run_that_no_range_has_is_refused() {
    let memory = memory(PAGES, MemoryKind::Memfd);
    let ranges = register(&memory, 1);
    for (slot, first, pages) in [(SLOT, PAGES - 1, 2), (SLOT, u64::MAX, 2), (SlotId(1), 0, 2)] {
        let run = PageRun { slot, first, pages };
        let error = ranges.place(run, &[1; 2 * PAGE_SIZE], Wake::Now).unwrap_err();
        assert!(matches!(error, FaultError::NoRange { .. }), "{error}");
    }
    let error = ranges.place(page(0), &[1; 100], Wake::Now).unwrap_err();
    assert!(matches!(error, FaultError::BufferLength { .. }), "{error}");
}

#[test]
fn ranges_that_overlap_are_refused() {
    let range = |start: u64, pages: u64| {
        let descriptor = FaultDescriptor::open(PAGE).unwrap();
        let addresses = start..start + pages * PAGE;
        FaultRange { slot: SLOT, first_page: 0, addresses, share: 0, descriptor }
    };
    let error = FaultRanges::of(vec![range(0x9000, 1), range(0x5000, 5)]).unwrap_err();
    assert!(matches!(error, FaultError::Overlap { at: 0x9000 }), "{error}");
    let ranges = FaultRanges::of(vec![range(0x9000, 1), range(0x5000, 4)]).unwrap();
    let has = |address| ranges.range_at(address).map(|range| range.addresses.start);
    assert_eq!(
        [0x4fff, 0x5000, 0x8fff, 0x9000, 0xa000].map(has),
        [None, Some(0x5000), Some(0x5000), Some(0x9000), None]
    );
}
