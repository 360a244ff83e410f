//! Trap: a thread that waits at one page must not keep others from theirs.

use std::collections::BTreeSet;

use vmferry_faults::{Access, FaultDescriptor, Outcome, Wake};
use vmferry_memory::{MemoryKind, PAGE_SIZE};

use crate::support::{Contents, PAGE, answer, memory, next_fault, page, register};

const PAGES: u64 = 64;

/// A thread that waits holds none of the process's locks: other threads are served, and mappings
/// can change.
#[test]
fn pages_are_served_while_another_thread_waits() {
    let contents = Contents::of(1);
    for kind in [MemoryKind::Private, MemoryKind::Memfd] {
        let memory = memory(PAGES, kind);
        let ranges = register(&memory, 1);
        let content = |first| {
            let mut content = [0; PAGE_SIZE];
            memory.copy_out(page(first), &mut content).unwrap();
            content
        };
        std::thread::scope(|scope| {
            let first = scope.spawn(|| content(5));
            let waits_at = next_fault(&ranges, 0);
            for other in [6, 40, 4] {
                let second = scope.spawn(move || content(other));
                answer(&ranges, next_fault(&ranges, 0), contents);
                assert_eq!(second.join().unwrap(), contents.page(other));
            }
            crate::support::memory(PAGES, kind).zero(page(0)).unwrap();
            assert!(!first.is_finished());
            answer(&ranges, waits_at, contents);
            assert_eq!(first.join().unwrap(), contents.page(5));
        });
    }
}

/// More faults than one system call reads.
#[test]
fn faults_of_many_threads_are_each_reported_once() {
    const THREADS: u64 = 150;
    let memory = memory(THREADS, MemoryKind::Private);
    let descriptor = FaultDescriptor::open(PAGE).unwrap();
    descriptor.register_slot(&memory.slots()[0], 0..THREADS).unwrap();
    let start = memory.slots()[0].host_address() as u64;
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let memory = &memory;
            scope.spawn(move || match thread % 2 {
                0 => memory.read_at(thread * PAGE, &mut [0]).unwrap(),
                _ => memory.write_at(thread * PAGE, &[1]).unwrap(),
            });
        }
        let mut faults = Vec::new();
        while faults.len() < THREADS as usize {
            descriptor.read_faults(&mut faults).unwrap();
            std::thread::yield_now();
        }
        let pages: BTreeSet<u64> =
            faults.iter().map(|fault| (fault.address - start) / PAGE).collect();
        assert_eq!(pages, (0..THREADS).collect());
        for fault in &faults {
            let writes = (fault.address - start) / PAGE % 2 == 1;
            assert_eq!(fault.access, if writes { Access::Write } else { Access::Read });
        }
        // One page at each end of a batch, and the rest between them.
        for (first, pages) in [(0, 1), (THREADS - 1, 1), (0, THREADS)] {
            let bytes = vec![7; (pages * PAGE) as usize];
            descriptor.place(start + first * PAGE, &bytes, Wake::Later).unwrap();
        }
        descriptor.wake(&(start..start + THREADS * PAGE)).unwrap();
    });
}

/// A thread that waits goes on waiting until the wake-up, although its page is there.
#[test]
fn page_placed_without_a_wake_up_lets_its_thread_wait() {
    let memory = memory(PAGES, MemoryKind::Memfd);
    let ranges = register(&memory, 1);
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| memory.read_at(5 * PAGE, &mut [0]).unwrap());
        let address = next_fault(&ranges, 0);
        ranges.place(page(5), &[7; PAGE_SIZE], Wake::Later).unwrap();
        assert!(!thread.is_finished());
        let mut outcomes = Vec::new();
        // A page that is there is woken too.
        let range = &ranges.ranges()[0];
        let found = |_, outcome| outcomes.push(outcome);
        range.descriptor.place_each(address, &[8; PAGE_SIZE], Wake::Now, found).unwrap();
        assert_eq!(outcomes, [Outcome::AlreadyThere]);
        thread.join().unwrap();
    });
    let mut byte = [0];
    memory.read_at(5 * PAGE, &mut byte).unwrap();
    assert_eq!(byte, [7]);
}
