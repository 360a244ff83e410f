//! Trap: a wake-up without a page, on shared memory whose file may use huge pages. The thread
//! must fault again, and must not get a huge page of which only a part was placed.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount,
    fsopen,
};
use vmferry_faults::{FaultRanges, Placement, Wake};
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, PageRun, SlotLayout};

use crate::support::{
    Contents, PAGE, SLOT, answer, memory, next_fault, page, populated, register, reserve_huge_pages,
};

/// Number of pages in a huge page.
const HUGE: u64 = 512;

/// Memory in a file whose pages are huge wherever the kernel can have them: a tmpfs that is mounted
/// nowhere.
fn transparent(pages: u64) -> GuestMemory {
    let tmpfs = (|| {
        let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_set_string(context.as_fd(), "huge", "always")?;
        fsconfig_create(context.as_fd())?;
        fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
    })();
    let tmpfs: OwnedFd = tmpfs.expect("this test needs to mount a tmpfs, as root");
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&tmpfs, "memory", flags, Mode::RUSR | Mode::WUSR).unwrap();
    rustix::fs::ftruncate(&file, pages * PAGE).unwrap();
    let layout = SlotLayout { slot: SLOT, gpa: 0, pages };
    GuestMemory::map_files(vec![(layout, File::from(file), 0)]).unwrap()
}

/// A thread waits at `first`. It is woken often, and gets nothing until its page is placed.
fn woken_without_a_page(memory: &GuestMemory, ranges: &FaultRanges, first: u64) {
    let before = populated(memory);
    let contents = Contents::of(1);
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let mut content = [0; PAGE_SIZE];
            memory.copy_out(page(first), &mut content).unwrap();
            content
        });
        for _ in 0..20 {
            next_fault(ranges, 0);
            assert_eq!(populated(memory), before);
            ranges.wake_all().unwrap();
        }
        answer(ranges, next_fault(ranges, 0), contents);
        assert_eq!(thread.join().unwrap(), contents.page(first));
    });
}

#[test]
fn wake_up_without_a_page_places_none_of_a_transparent_huge_page() {
    let memory = transparent(8 * HUGE);
    // The file does get huge pages where nothing is registered.
    memory.write_at(0, &[1]).unwrap();
    assert_eq!(populated(&memory), [(0, HUGE)], "this test needs huge pages on tmpfs");
    memory.punch().unwrap();

    let ranges = register(&memory, 1);
    for (at, first) in [(1, 3 * HUGE + 7), (2, 3 * HUGE + 8), (3, 3 * HUGE)] {
        woken_without_a_page(&memory, &ranges, first);
        let count: u64 = populated(&memory).iter().map(|(_, pages)| pages).sum();
        assert_eq!(count, at, "one page for each that was placed");
    }
    // A batch of a whole huge page, too, leaves what is there.
    let run = PageRun { slot: SLOT, first: 3 * HUGE, pages: HUGE };
    let batch = vec![9; (HUGE * PAGE) as usize];
    let placement = ranges.place(run, &batch, Wake::Now).unwrap();
    let expected = Placement { placed_bytes: (HUGE - 3) * PAGE, present_bytes: 3 * PAGE };
    assert_eq!(placement, expected);
    let mut content = [0; PAGE_SIZE];
    memory.copy_out(page(3 * HUGE + 7), &mut content).unwrap();
    assert_eq!(content, Contents::of(1).page(3 * HUGE + 7));
}

/// 4 KiB holes in huge pages: the file's old content is not seen again.
#[test]
fn hole_in_a_transparent_huge_page_is_missing() {
    let memory = transparent(4 * HUGE);
    for first in 0..4 * HUGE {
        memory.write_at(first * PAGE, &[3]).unwrap();
    }
    let contents = Contents::of(2);
    let holes = [5, HUGE - 1, 2 * HUGE, 2 * HUGE + 1];
    for hole in holes {
        memory.discard(page(hole)).unwrap();
    }
    let ranges = register(&memory, 1);
    std::thread::scope(|scope| {
        for hole in holes {
            let memory = &memory;
            let thread = scope.spawn(move || {
                let mut content = [0; PAGE_SIZE];
                memory.copy_out(page(hole), &mut content).unwrap();
                content
            });
            answer(&ranges, next_fault(&ranges, 0), contents);
            assert_eq!(thread.join().unwrap(), contents.page(hole));
        }
    });
    for first in (0..4 * HUGE).filter(|first| !holes.contains(first)) {
        let mut byte = [0];
        memory.read_at(first * PAGE, &mut byte).unwrap();
        assert_eq!(byte, [3]);
    }
}

#[test]
fn wake_up_without_a_page_places_no_reserved_huge_page() {
    let _pool = reserve_huge_pages(4);
    let memory = memory(4 * HUGE, MemoryKind::Hugetlb);
    let ranges = register(&memory, 1);
    woken_without_a_page(&memory, &ranges, HUGE + 7);
    assert_eq!(populated(&memory), [(HUGE, HUGE)]);
    woken_without_a_page(&memory, &ranges, 3 * HUGE);
    assert_eq!(populated(&memory), [(HUGE, HUGE), (3 * HUGE, HUGE)]);
}

#[test]
fn reserved_huge_page_of_zeros_is_placed() {
    let _pool = reserve_huge_pages(2);
    let memory = memory(2 * HUGE, MemoryKind::Hugetlb);
    let ranges = register(&memory, 1);
    let range = &ranges.ranges()[0];
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let mut byte = [1];
            memory.read_at((HUGE + 9) * PAGE, &mut byte).unwrap();
            byte
        });
        let address = next_fault(&ranges, 0);
        assert_eq!(address, range.addresses.start + HUGE * PAGE, "the huge page's first byte");
        let placement = range.descriptor.place_zeros(&range.addresses, Wake::Now).unwrap();
        assert_eq!(placement, Placement { placed_bytes: 2 * HUGE * PAGE, present_bytes: 0 });
        assert_eq!(thread.join().unwrap(), [0]);
    });
}

/// The pool has exactly the guest's pages: the second mapping takes none.
#[test]
fn reserved_huge_page_is_shown_when_its_parts_are_written() {
    let _pool = reserve_huge_pages(3);
    let memory = memory(3 * HUGE, MemoryKind::Hugetlb);
    for first in 0..HUGE {
        memory.write_at(first * PAGE, &[3]).unwrap();
    }
    let ranges = register(&memory, 1);
    let huge_page = |first| PageRun { slot: SLOT, first, pages: HUGE };
    // The first one was populated, the second and the third never were.
    ranges.hide(huge_page(0)).unwrap();
    assert_eq!(ranges.unit_pages(SLOT), HUGE);
    let contents = Contents::of(5);
    for first in [0, HUGE] {
        std::thread::scope(|scope| {
            let memory = &memory;
            let thread = scope.spawn(move || {
                let (mut content, mut old) = ([0; PAGE_SIZE], [0]);
                memory.copy_out(page(first + 9), &mut content).unwrap();
                memory.read_at((first + 8) * PAGE, &mut old).unwrap();
                (content, old)
            });
            assert_eq!(page_of(&ranges, next_fault(&ranges, 0)), first);
            ranges.write_hidden(page(first + 9), Some(&contents.page(first + 9))).unwrap();
            ranges.wake_all().unwrap();
            assert_eq!(page_of(&ranges, next_fault(&ranges, 0)), first, "it is hidden still");
            ranges.show(huge_page(first)).unwrap();
            let expected = if first == 0 { [3] } else { [0] };
            assert_eq!(thread.join().unwrap(), (contents.page(first + 9), expected));
        });
    }
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let mut byte = [1];
            memory.read_at(2 * HUGE * PAGE, &mut byte).unwrap();
            byte
        });
        assert_eq!(page_of(&ranges, next_fault(&ranges, 0)), 2 * HUGE);
        ranges.show(huge_page(2 * HUGE)).unwrap();
        assert_eq!(thread.join().unwrap(), [0]);
    });
    ranges.show(huge_page(0)).expect("it is shown already");
}

fn page_of(ranges: &FaultRanges, address: u64) -> u64 {
    ranges.range_at(address).unwrap().page_at(address)
}
