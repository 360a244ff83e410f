//! Trap: a missing page of a shared file is a hole in the file.

use std::os::unix::fs::FileExt;

use vmferry_faults::{Placement, Wake};
use vmferry_memory::{Backing, GuestMemory, MemoryKind, PAGE_SIZE, SlotLayout};

use crate::support::{
    Contents, PAGE, SLOT, memory, page, pending, populated, register, while_served,
};

const PAGES: u64 = 64;

fn content(memory: &GuestMemory, first: u64) -> [u8; PAGE_SIZE] {
    let mut content = [1; PAGE_SIZE];
    memory.copy_out(page(first), &mut content).unwrap();
    content
}

/// The hazard: a read through a second mapping places a page of zeros, and the guest's own access
/// finds that.
#[test]
fn read_through_a_second_mapping_loses_a_missing_page() {
    let memory = memory(PAGES, MemoryKind::Memfd);
    let Backing::File { file, .. } = memory.slots()[0].backing() else { unreachable!() };
    let layout = SlotLayout { slot: SLOT, gpa: 0, pages: PAGES };
    let second = vec![(layout, file.try_clone().unwrap(), 0)];
    let second = GuestMemory::map_files(second).unwrap();
    let ranges = register(&memory, 1);
    second.read_at(5 * PAGE, &mut [0]).unwrap();
    assert_eq!(populated(&memory), [(5, 1)]);
    assert_eq!(content(&memory, 5), [0; PAGE_SIZE], "without a handler");
    assert_eq!(pending(&ranges), 0);
    let placement = ranges.place(page(5), &[7; PAGE_SIZE], Wake::Now).unwrap();
    assert_eq!(placement, Placement { placed_bytes: 0, present_bytes: PAGE });
    assert_eq!(content(&memory, 5), [0; PAGE_SIZE]);
}

/// Looking for populated pages, in the file or in the page table, leaves missing pages missing. So
/// does `pread`.
#[test]
fn search_for_populated_pages_leaves_missing_pages_missing() {
    let contents = Contents::of(1);
    for kind in [MemoryKind::Private, MemoryKind::Memfd] {
        let memory = memory(PAGES, kind);
        let ranges = register(&memory, 1);
        ranges.place(page(3), &contents.page(3), Wake::Now).unwrap();
        assert_eq!(populated(&memory), [(3, 1)], "{kind}");
        assert_eq!(memory.used_bytes().len(), 1);
        if let Backing::File { file, .. } = memory.slots()[0].backing() {
            let mut content = [1; PAGE_SIZE];
            file.read_exact_at(&mut content, 5 * PAGE).unwrap();
            assert_eq!(content, [0; PAGE_SIZE]);
        }
        assert_eq!((populated(&memory), pending(&ranges)), (vec![(3, 1)], 0));
        let (found, faults) = while_served(&ranges, contents, || content(&memory, 5));
        assert_eq!((found, faults), (contents.page(5), 1));
    }
}
