//! A harvest allocates nothing, on any kind of memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use vmferry_dirty::{DirtyLog, DirtyLogError, UffdLog};
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, PageSet, SlotId, SlotLayout};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: everything is left to the system's allocator; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above; `pointer` came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_harvest_allocates_nothing() {
    const PAGES: u64 = 6000;
    for kind in [MemoryKind::Private, MemoryKind::Memfd] {
        let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: PAGES }];
        let memory = GuestMemory::allocate(&layout, kind).unwrap();
        let log = match UffdLog::new(&memory) {
            Ok(log) => log,
            Err(error @ DirtyLogError::Unavailable { .. }) => {
                eprintln!("SKIPPED: a_harvest_allocates_nothing: {error}");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        let write = |page: u64| memory.write_at(page * PAGE_SIZE as u64, &[1]).unwrap();
        (0..PAGES / 3).for_each(write);
        log.start().unwrap();
        let mut pages = PageSet::for_memory(&memory);
        for round in 0..4 {
            // More runs than fit one system call, and blocks that had no data before.
            (0..PAGES / 4 * round).step_by(2).for_each(write);
            pages.clear_all();
            let before = ALLOCATIONS.with(Cell::get);
            log.collect(&mut pages).unwrap();
            assert_eq!(ALLOCATIONS.with(Cell::get), before, "{kind}");
            assert_eq!(pages.count(), PAGES / 8 * round, "{kind}");
        }
    }
}
