//! userfaultfd with threads of this process that write continuously.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, PageSet, SlotId};

use super::{check, follow_threads, memory};
use crate::{DirtyLog, DirtyLogError, UffdLog};

const PAGES: u64 = 3000;

/// Writes a counter into random pages until stopped.
pub fn write(
    memory: &GuestMemory,
    pages: u64,
    writer: u64,
    stop: &AtomicBool,
    written: &AtomicU64,
) {
    let mut random = fastrand::Rng::with_seed(writer);
    while !stop.load(Ordering::Acquire) {
        let at = random.u64(..pages) * PAGE_SIZE as u64 + 8 * writer;
        memory.write_at(at, &random.u64(..).to_le_bytes()).unwrap();
        written.fetch_add(1, Ordering::Release);
    }
}

fn run(kind: MemoryKind, populate: bool) {
    let memory = memory(PAGES, kind);
    if populate {
        for page in 0..PAGES {
            memory.write_at(page * PAGE_SIZE as u64, &[1]).unwrap();
        }
    }
    let log = UffdLog::new(&memory).expect("this test needs userfaultfd");
    let followed = follow_threads(&memory, &log, 30, 2, |writer, stop, written| {
        write(&memory, PAGES, writer, stop, written);
    });
    check(&memory, followed);
}

#[test]
fn userfaultfd_follows_private_memory() {
    run(MemoryKind::Private, false);
}

#[test]
fn userfaultfd_follows_populated_private_memory() {
    run(MemoryKind::Private, true);
}

#[test]
fn userfaultfd_follows_a_memfd() {
    run(MemoryKind::Memfd, false);
    run(MemoryKind::Memfd, true);
}

#[test]
fn userfaultfd_follows_huge_pages() {
    run(MemoryKind::Thp, true);
}

#[test]
fn userfaultfd_populates_nothing_and_sees_the_first_write_of_a_page() {
    for kind in [MemoryKind::Private, MemoryKind::Memfd] {
        let memory = memory(1 << 21, kind);
        let log = UffdLog::new(&memory).expect("this test needs userfaultfd");
        memory.write_at(0, &[1]).unwrap();
        log.start().unwrap();
        assert_eq!(memory.populated().unwrap().count(), 1);
        let mut pages = PageSet::for_memory(&memory);
        log.collect(&mut pages).unwrap();
        assert!(pages.is_empty(), "{kind}: nothing was written since the start");
        memory.write_at(70_000 * PAGE_SIZE as u64, &[1]).unwrap();
        log.collect(&mut pages).unwrap();
        let runs: Vec<_> = pages.bitmap(SlotId(0)).runs().collect();
        assert_eq!(runs, [(70_000, 1)], "{kind}");
        log.stop().unwrap();
        log.stop().unwrap();
        assert!(matches!(log.collect(&mut pages), Err(DirtyLogError::NotStarted { .. })));
    }
}
