//! Every log with writers that never pause. A shadow copy, made as the engine copies, must equal
//! memory at the end, and must not if one dirty page is left out.

mod child;
mod huge_pages;
mod kvm_guest;
mod process;
mod regions;
mod software;
mod threads;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, PageRun, PageSet, SlotId, SlotLayout};

use crate::{DirtyLog, KvmSlot, UnionLog};

/// The result of one run of a log.
struct Followed {
    shadow: Vec<Vec<u8>>,
    /// A page whose content changed in the last harvest, with the shadow's content before it.
    last_change: Option<(SlotId, u64, Vec<u8>)>,
}

/// Times between harvests in milliseconds, used in turn: immediately, and as between rounds.
const INTERVALS_MS: [u64; 6] = [0, 1, 0, 5, 20, 50];

/// Follows memory with a log: `rounds` harvests while the writers write, at [`INTERVALS_MS`], then
/// one after `stop`. `wait` returns when the writers have written more.
fn follow(
    memory: &GuestMemory,
    log: &dyn DirtyLog,
    rounds: u32,
    mut wait: impl FnMut(),
    stop: impl FnOnce(),
) -> Followed {
    let mut shadow: Vec<Vec<u8>> =
        memory.slots().iter().map(|slot| vec![0; slot.len_bytes()]).collect();
    log.start().unwrap();
    copy(memory, log, &memory.populated().unwrap(), &mut shadow);
    let mut pages = PageSet::for_memory(memory);
    let mut seen = 0;
    for (_, interval) in (0..rounds).zip(INTERVALS_MS.into_iter().cycle()) {
        std::thread::sleep(Duration::from_millis(interval));
        wait();
        pages.clear_all();
        log.collect(&mut pages).unwrap();
        seen += pages.count();
        copy(memory, log, &pages, &mut shadow);
    }
    assert!(seen > 0, "the writers wrote and the log saw nothing");
    wait();
    stop();
    pages.clear_all();
    log.collect_last(&mut pages).unwrap();
    let mut last_change = None;
    let mut content = [0; PAGE_SIZE];
    for run in pages.runs() {
        for page in run.first..run.first + run.pages {
            memory.copy_out(PageRun { first: page, pages: 1, ..run }, &mut content).unwrap();
            let old = &shadow[usize::from(run.slot.0)][page as usize * PAGE_SIZE..][..PAGE_SIZE];
            if old != content {
                last_change = Some((run.slot, page, old.to_vec()));
            }
        }
    }
    copy(memory, log, &pages, &mut shadow);
    log.stop().unwrap();
    Followed { shadow, last_change }
}

/// Follows memory that `writers` threads of this process write. Each gets its number, a flag that
/// tells it to stop, and a counter for its writes. There are writes between any two harvests.
fn follow_threads(
    memory: &GuestMemory,
    log: &dyn DirtyLog,
    rounds: u32,
    writers: u64,
    write: impl Fn(u64, &AtomicBool, &AtomicU64) + Sync,
) -> Followed {
    const WRITES: u64 = 300;
    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..writers)
            .map(|writer| {
                let (write, stop, written) = (&write, &stop, &written);
                scope.spawn(move || write(writer, stop, written))
            })
            .collect();
        let wait = || {
            let until = written.load(Ordering::Acquire) + WRITES;
            while written.load(Ordering::Acquire) < until {
                std::thread::yield_now();
            }
        };
        follow(memory, log, rounds, wait, || {
            stop.store(true, Ordering::Release);
            writers.into_iter().for_each(|writer| writer.join().unwrap());
        })
    })
}

/// Re-arms, then copies, in batches of 64 pages as the engine does.
fn copy(memory: &GuestMemory, log: &dyn DirtyLog, pages: &PageSet, shadow: &mut [Vec<u8>]) {
    for (slot, bitmap) in pages.iter() {
        for (index, word) in bitmap.words().iter().enumerate().filter(|(_, word)| **word != 0) {
            log.rearm(slot, index, &[*word]).unwrap();
            for bit in (0..64).filter(|bit| word >> bit & 1 == 1) {
                let first = index as u64 * 64 + bit;
                let into = &mut shadow[usize::from(slot.0)][first as usize * PAGE_SIZE..];
                let run = PageRun { slot, first, pages: 1 };
                memory.copy_out(run, &mut into[..PAGE_SIZE]).unwrap();
            }
        }
    }
}

/// Compares the shadow with memory, then leaves out one changed page of the last harvest and
/// compares again.
fn check(memory: &GuestMemory, mut followed: Followed) {
    assert_eq!(differences(memory, &followed.shadow), 0, "the log has missed writes");
    let (slot, page, old) = followed
        .last_change
        .expect("the last harvest changes something: the writers wrote until it came");
    // As if the log had not reported this page: the shadow keeps the old content.
    let kept = &mut followed.shadow[usize::from(slot.0)][page as usize * PAGE_SIZE..][..PAGE_SIZE];
    kept.copy_from_slice(&old);
    assert_eq!(differences(memory, &followed.shadow), 1, "the comparison sees a stale page");
}

fn differences(memory: &GuestMemory, shadow: &[Vec<u8>]) -> usize {
    let mut content = [0; PAGE_SIZE];
    let mut different = 0;
    for slot in memory.slots() {
        for (page, old) in shadow[usize::from(slot.id().0)].chunks_exact(PAGE_SIZE).enumerate() {
            let run = PageRun { slot: slot.id(), first: page as u64, pages: 1 };
            memory.copy_out(run, &mut content).unwrap();
            different += usize::from(old != content);
        }
    }
    different
}

/// A lab's slots in the form that the logs take.
pub(crate) fn kvm_slots(machine: &vmferry_kvm_lab::Machine) -> Vec<KvmSlot> {
    let slots = machine.slots().iter();
    slots
        .map(|slot| KvmSlot {
            slot: slot.slot,
            kvm_slot: slot.kvm_slot,
            gpa: slot.gpa,
            bytes: slot.bytes,
            host_address: slot.host_address,
        })
        .collect()
}

fn memory(pages: u64, kind: MemoryKind) -> GuestMemory {
    let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages }];
    GuestMemory::allocate(&layout, kind).unwrap()
}

/// The runs of slot 0.
fn runs(pages: &PageSet) -> Vec<(u64, u64)> {
    pages.bitmap(SlotId(0)).runs().collect()
}

/// Advises the kernel about pages of slot 0. The kernel may refuse.
fn zap(memory: &GuestMemory, first: u64, pages: u64, advice: libc::c_int) {
    let at = memory.slots()[0].host_address().wrapping_add(first as usize * PAGE_SIZE);
    // SAFETY: the pages are the test's own memory, to which no reference exists.
    let _ = unsafe { libc::madvise(at.cast(), pages as usize * PAGE_SIZE, advice) };
}

#[test]
fn returned_pages_are_in_the_next_harvest() {
    let log = UnionLog::new(vec![Arc::new(())]);
    let memory = memory(100, MemoryKind::Private);
    let mut pages = PageSet::for_memory(&memory);
    pages.bitmap_mut(SlotId(0)).set(7);
    log.give_back(&pages);
    pages.clear_all();
    pages.bitmap_mut(SlotId(0)).set(70);
    log.give_back(&pages);
    pages.clear_all();
    log.start().unwrap();
    log.collect(&mut pages).unwrap();
    assert_eq!(pages.bitmap(SlotId(0)).runs().collect::<Vec<_>>(), [(7, 1), (70, 1)]);
    pages.clear_all();
    log.collect(&mut pages).unwrap();
    assert!(pages.is_empty(), "once");
    assert_eq!(log.name(), "none");
}
