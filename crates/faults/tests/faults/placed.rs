//! The outcomes of placing.

use vmferry_faults::{Outcome, Placement, Wake};
use vmferry_memory::{MemoryKind, PAGE_SIZE, PageRun};

use crate::support::{PAGE, SLOT, memory, page, populated, register};

const PAGES: u64 = 64;
const KINDS: [MemoryKind; 2] = [MemoryKind::Private, MemoryKind::Memfd];

#[test]
fn pages_that_exist_are_kept_and_the_others_placed() {
    for kind in KINDS {
        let memory = memory(PAGES, kind);
        let ranges = register(&memory, 1);
        let start = ranges.ranges()[0].addresses.start;
        for first in [3, 4] {
            ranges.place(page(first), &[1; PAGE_SIZE], Wake::Now).unwrap();
        }
        let mut outcomes = Vec::new();
        let found = |range: std::ops::Range<u64>, outcome| {
            outcomes.push(((range.start - start) / PAGE, (range.end - start) / PAGE, outcome));
        };
        let pages = [2; 8 * PAGE_SIZE];
        ranges.ranges()[0].descriptor.place_each(start, &pages, Wake::Now, found).unwrap();
        let expected = [
            (0, 3, Outcome::Placed),
            (3, 4, Outcome::AlreadyThere),
            (4, 5, Outcome::AlreadyThere),
            (5, 8, Outcome::Placed),
        ];
        assert_eq!(outcomes, expected, "{kind}");
        assert_eq!(populated(&memory), [(0, 8)]);
        let mut bytes = [0; 8];
        for (at, byte) in (0..).zip(&mut bytes) {
            memory.read_at(at * PAGE + 4000, std::slice::from_mut(byte)).unwrap();
        }
        assert_eq!(bytes, [2, 2, 2, 1, 1, 2, 2, 2]);
    }
}

#[test]
fn run_in_several_ranges_is_placed_as_a_whole() {
    let memory = memory(2000, MemoryKind::Memfd);
    let ranges = register(&memory, 4);
    let starts: Vec<u64> = ranges.ranges().iter().map(|range| range.first_page).collect();
    assert_eq!((starts, ranges.shares()), (vec![0, 512, 1024, 1536], 4));
    ranges.place(page(512), &[1; PAGE_SIZE], Wake::Now).unwrap();
    let run = PageRun { slot: SLOT, first: 500, pages: 1100 };
    let placement = ranges.place(run, &vec![2; 1100 * PAGE_SIZE], Wake::Now).unwrap();
    assert_eq!(placement, Placement { placed_bytes: 1099 * PAGE, present_bytes: PAGE });
    assert_eq!(populated(&memory), [(500, 1100)]);
    ranges.wake(run).unwrap();
}

#[test]
fn pages_of_zeros_are_placed() {
    for kind in KINDS {
        let memory = memory(PAGES, kind);
        let ranges = register(&memory, 1);
        let start = ranges.ranges()[0].addresses.start;
        let descriptor = &ranges.ranges()[0].descriptor;
        ranges.place(page(1), &[1; PAGE_SIZE], Wake::Now).unwrap();
        let placement = descriptor.place_zeros(&(start..start + 4 * PAGE), Wake::Now).unwrap();
        assert_eq!(placement, Placement { placed_bytes: 3 * PAGE, present_bytes: PAGE });
        let mut bytes = [9; 4];
        for (at, byte) in (0..).zip(&mut bytes) {
            memory.read_at(at * PAGE, std::slice::from_mut(byte)).unwrap();
        }
        assert_eq!(bytes, [0, 1, 0, 0]);
        // In private memory they are the shared zero page, which takes no memory.
        let expected = if kind == MemoryKind::Private { vec![(1, 1)] } else { vec![(0, 4)] };
        assert_eq!(populated(&memory), expected);
        memory.write_at(2 * PAGE, &[5]).unwrap();
        memory.read_at(2 * PAGE, &mut bytes[..1]).unwrap();
        assert_eq!(bytes[0], 5);
    }
}
