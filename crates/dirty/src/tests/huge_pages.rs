//! userfaultfd on huge pages: reserved ones, and transparent ones that are collapsed and split
//! while threads write.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use vmferry_kit::HugePages;
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, PageSet, SlotId};

use super::threads::write;
use super::{check, follow, memory, runs, zap};
use crate::{DirtyLog, UffdLog};

const PAGE: u64 = PAGE_SIZE as u64;
/// Number of pages in a huge page.
const HUGE: u64 = 512;
/// `MADV_COLLAPSE` of `include/uapi/asm-generic/mman-common.h`, since Linux 6.1.
const MADV_COLLAPSE: libc::c_int = 25;

/// Follows two writers while a third thread runs `meanwhile` in a loop.
fn run(memory: &GuestMemory, mut meanwhile: impl FnMut(u64) + Send) {
    let log = UffdLog::new(memory).expect("this test needs userfaultfd");
    let pages = memory.total_pages();
    let (stop, written, done) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let followed = std::thread::scope(|scope| {
        let (stop, written, done) = (&stop, &written, &done);
        let mut threads: Vec<_> = (0..2)
            .map(|writer| scope.spawn(move || write(memory, pages, writer, stop, written)))
            .collect();
        threads.push(scope.spawn(move || {
            while !stop.load(Ordering::Acquire) {
                meanwhile(done.fetch_add(1, Ordering::Release));
            }
        }));
        let wait = || {
            let (until, then) = (written.load(Ordering::Acquire), done.load(Ordering::Acquire));
            while written.load(Ordering::Acquire) < until + 500
                || done.load(Ordering::Acquire) < then + 2
            {
                std::thread::yield_now();
            }
        };
        follow(memory, &log, 30, wait, || {
            stop.store(true, Ordering::Release);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        })
    });
    check(memory, followed);
}

#[test]
fn userfaultfd_follows_reserved_huge_pages() {
    let _pool = HugePages::reserve(6);
    run(&memory(6 * HUGE, MemoryKind::Hugetlb), |_| std::thread::yield_now());
}

#[test]
fn userfaultfd_follows_reserved_huge_pages_that_leave_the_page_table() {
    let _pool = HugePages::reserve(6);
    let memory = memory(6 * HUGE, MemoryKind::Hugetlb);
    run(&memory, |count| zap(&memory, count % 6 * HUGE, HUGE, libc::MADV_DONTNEED));
}

#[test]
fn huge_page_write_reports_every_page() {
    let _pool = HugePages::reserve(6);
    let memory = memory(6 * HUGE, MemoryKind::Hugetlb);
    let log = UffdLog::new(&memory).expect("this test needs userfaultfd");
    let write = |page: u64| memory.write_at(page * PAGE, &[1]).unwrap();
    write(3);
    log.start().unwrap();
    let mut pages = PageSet::for_memory(&memory);
    let mut collect = || {
        pages.clear_all();
        log.collect(&mut pages).unwrap();
        runs(&pages)
    };
    assert_eq!(collect(), [], "what was populated before, and what is not, is clean");
    write(7);
    write(2 * HUGE + 5);
    assert_eq!(collect(), [(0, HUGE), (2 * HUGE, HUGE)], "whole, populated before or not");
    assert_eq!(collect(), [], "and protected again");
    memory.read_at(3 * HUGE_BYTES, &mut [0]).unwrap();
    write(4 * HUGE);
    zap(&memory, 4 * HUGE, HUGE, libc::MADV_DONTNEED);
    let found = collect();
    assert!(found.contains(&(4 * HUGE, HUGE)), "{found:?}");
    assert_eq!(collect(), []);
    assert_eq!(memory.populated().unwrap().count() % HUGE, 0);

    // A part of a huge page cannot be removed.
    let start = memory.slots()[0].host_address() as u64;
    let error = log.remove_region(start..start + PAGE).unwrap_err();
    assert!(error.to_string().contains("whole pages of 2097152 bytes"), "{error}");
    log.remove_region(start..start + HUGE_BYTES).unwrap();
    write(1);
    assert_eq!(collect(), []);
    write(2);
    log.add_region(SlotId(0), 0, start..start + HUGE_BYTES).unwrap();
    let found = collect();
    assert!(found[0].0 == 0 && found[0].1 >= HUGE, "{found:?}");
    assert_eq!(collect(), []);
    log.stop().unwrap();
}

const HUGE_BYTES: u64 = HUGE * PAGE;

#[test]
fn userfaultfd_follows_private_memory_that_is_collapsed_and_split() {
    let memory = memory(6 * HUGE, MemoryKind::Thp);
    (0..6 * HUGE).for_each(|page| memory.write_at(page * PAGE, &[1]).unwrap());
    run(&memory, |count| {
        let page = count * 97 % (5 * HUGE);
        match count % 3 {
            // The kernel refuses this where a page is protected, and does it where all pages were
            // written.
            0 => collapse(&memory),
            1 => zap(&memory, page, 64, libc::MADV_PAGEOUT),
            _ => zap(&memory, page, 3, libc::MADV_COLD),
        }
    });
}

#[test]
fn userfaultfd_follows_shared_memory_that_is_collapsed_and_dropped() {
    let memory = memory(6 * HUGE, MemoryKind::Memfd);
    (0..4 * HUGE).for_each(|page| memory.write_at(page * PAGE, &[1]).unwrap());
    run(&memory, |count| {
        let page = count * 97 % (5 * HUGE);
        match count % 3 {
            0 => collapse(&memory),
            1 => zap(&memory, page, 64, libc::MADV_PAGEOUT),
            // The kernel may free the whole page table of a block.
            _ => zap(&memory, page, HUGE, libc::MADV_DONTNEED),
        }
    });
}

/// Collapses whatever the kernel permits.
fn collapse(memory: &GuestMemory) {
    let slot = &memory.slots()[0];
    // SAFETY: the range is the slot; the advice changes no content. The kernel may refuse.
    let _ = unsafe { libc::madvise(slot.host_address().cast(), slot.len_bytes(), MADV_COLLAPSE) };
}
