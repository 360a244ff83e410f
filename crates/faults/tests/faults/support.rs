//! Guests whose pages have known contents, and threads that serve and check them.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{PoisonError, RwLock, RwLockWriteGuard};

use rustix::event::{EventfdFlags, eventfd};
use vmferry_faults::{FaultRanges, Waited, Wake};
use vmferry_kit::HugePages;
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, PageRun, SlotId, SlotLayout};

pub const PAGE: u64 = PAGE_SIZE as u64;
pub const SLOT: SlotId = SlotId(0);

/// The last word of each page is written by the threads that check, and not compared.
const COMPARED: usize = PAGE_SIZE - 8;

pub fn memory(pages: u64, kind: MemoryKind) -> GuestMemory {
    GuestMemory::allocate(&[SlotLayout { slot: SLOT, gpa: 0, pages }], kind).unwrap()
}

pub fn register(memory: &GuestMemory, shares: usize) -> FaultRanges {
    FaultRanges::register(memory, shares).expect("this test needs userfaultfd, as root")
}

pub fn page(first: u64) -> PageRun {
    PageRun { slot: SLOT, first, pages: 1 }
}

/// A process that starts has duplicates of all descriptors until it executes its program. Those of
/// a file of huge pages would keep the pages from the pool.
pub static STARTS: RwLock<()> = RwLock::new(());

/// Huge pages for one test, in which no process starts.
pub struct Pool {
    _pages: HugePages,
    _no_starts: RwLockWriteGuard<'static, ()>,
}

pub fn reserve_huge_pages(pages: u64) -> Pool {
    // A test that fails while it has the lock leaves nothing behind.
    let no_starts = STARTS.write().unwrap_or_else(PoisonError::into_inner);
    Pool { _pages: HugePages::reserve(pages), _no_starts: no_starts }
}

/// The populated pages of slot 0, as runs.
pub fn populated(memory: &GuestMemory) -> Vec<(u64, u64)> {
    memory.populated().unwrap().bitmap(SLOT).runs().collect()
}

/// What the pages of a guest hold: random bytes, and one page of seven is zero.
#[derive(Clone, Copy, Debug)]
pub struct Contents {
    pub seed: u64,
    /// A page that is placed with a wrong byte.
    pub wrong: Option<u64>,
}

impl Contents {
    pub fn of(seed: u64) -> Self {
        Self { seed, wrong: None }
    }

    pub fn page(&self, page: u64) -> [u8; PAGE_SIZE] {
        let mut content = [0; PAGE_SIZE];
        let mut random = fastrand::Rng::with_seed(self.seed.wrapping_mul(0x9e37_79b9) ^ page);
        if random.u8(..7) > 0 {
            random.fill(&mut content);
        }
        content
    }

    /// The pages as they are placed.
    fn to_place(self, run: PageRun) -> Vec<u8> {
        let pages = (run.first..run.first + run.pages).map(|page| {
            let mut content = self.page(page);
            content[1000] ^= u8::from(self.wrong == Some(page));
            content
        });
        pages.flatten().collect()
    }
}

/// Places a page, or the huge page that has it, as the answer to a fault.
pub fn answer(ranges: &FaultRanges, address: u64, contents: Contents) {
    let range = ranges.range_at(address).expect("only registered ranges fault");
    let run = PageRun {
        slot: range.slot,
        first: range.page_at(address),
        pages: range.descriptor.page_bytes() / PAGE,
    };
    let content = contents.to_place(run);
    if content.iter().all(|byte| *byte == 0) {
        let whole = address..address + run.pages * PAGE;
        range.descriptor.place_zeros(&whole, Wake::Now).unwrap();
    } else {
        ranges.place(run, &content, Wake::Now).unwrap();
    }
}

/// Serves the faults of a share until `stop` is readable, and returns their number.
pub fn serve(ranges: &FaultRanges, share: usize, stop: impl AsFd, contents: Contents) -> usize {
    // If this thread panics, the threads that wait continue with zeros.
    let _let_go = LetGo(ranges);
    let mut share = ranges.share(share, stop.as_fd());
    let (mut faults, mut served) = (Vec::new(), 0);
    while share.wait(&mut faults).unwrap() == Waited::Faults {
        served += faults.len();
        faults.drain(..).for_each(|fault| answer(ranges, fault.address, contents));
    }
    served
}

struct LetGo<'a>(&'a FaultRanges);

impl Drop for LetGo<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The test must report the panic.
            let _ = self.0.unregister();
        }
    }
}

/// Places all pages of slot 0 in batches of random lengths in random order, and wakes each batch
/// once.
pub fn place_all(ranges: &FaultRanges, pages: u64, contents: Contents) {
    let _let_go = LetGo(ranges);
    let unit = ranges.ranges()[0].descriptor.page_bytes() / PAGE;
    let mut random = fastrand::Rng::with_seed(contents.seed);
    let mut runs = Vec::new();
    let mut first = 0;
    while first < pages {
        let pages = (random.u64(1..=32) * unit).min(pages - first);
        runs.push(PageRun { slot: SLOT, first, pages });
        first += pages;
    }
    random.shuffle(&mut runs);
    for run in runs {
        ranges.place(run, &contents.to_place(run), Wake::Later).unwrap();
        ranges.wake(run).unwrap();
    }
}

/// Reads or writes every page of slot 0 in random order, and returns the pages with wrong contents.
pub fn wrong_pages(memory: &GuestMemory, contents: Contents, thread: u64) -> Vec<u64> {
    let mut random = fastrand::Rng::with_seed(contents.seed ^ thread << 32);
    let mut order: Vec<u64> = (0..memory.total_pages()).collect();
    random.shuffle(&mut order);
    let mut wrong = Vec::new();
    let mut content = [0; PAGE_SIZE];
    for first in order {
        if random.bool() {
            memory.write_at(first * PAGE + COMPARED as u64, &thread.to_le_bytes()).unwrap();
        }
        memory.copy_out(page(first), &mut content).unwrap();
        if content[..COMPARED] != contents.page(first)[..COMPARED] {
            wrong.push(first);
        }
    }
    wrong.sort_unstable();
    wrong
}

/// Runs `act` while a thread for each share serves faults. Returns its result and the number of
/// faults.
pub fn while_served<T>(
    ranges: &FaultRanges,
    contents: Contents,
    act: impl FnOnce() -> T,
) -> (T, usize) {
    let stop = Stop::new();
    std::thread::scope(|scope| {
        let handlers: Vec<_> = (0..ranges.shares())
            .map(|share| {
                let stop = &stop.0;
                scope.spawn(move || serve(ranges, share, stop, contents))
            })
            .collect();
        // Also if it panics: or else the scope waits for ever.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act));
        stop.stop();
        let faults = handlers.into_iter().map(|handler| handler.join().unwrap()).sum();
        (result.unwrap_or_else(|panic| std::panic::resume_unwind(panic)), faults)
    })
}

/// Waits for one fault and returns the page's address.
pub fn next_fault(ranges: &FaultRanges, share: usize) -> u64 {
    let stop = Stop::new();
    let mut share = ranges.share(share, stop.0.as_fd());
    let mut faults = Vec::new();
    while faults.is_empty() {
        share.wait(&mut faults).unwrap();
    }
    assert_eq!(faults.len(), 1, "{faults:x?}");
    faults[0].address
}

/// The faults that are pending.
pub fn pending(ranges: &FaultRanges) -> usize {
    let mut faults = Vec::new();
    for range in ranges.ranges() {
        range.descriptor.read_faults(&mut faults).unwrap();
    }
    faults.len()
}

/// Ends the waits of handlers.
pub struct Stop(pub OwnedFd);

impl Stop {
    pub fn new() -> Self {
        Self(eventfd(0, EventfdFlags::CLOEXEC).unwrap())
    }

    pub fn stop(&self) {
        rustix::io::write(&self.0, &1_u64.to_ne_bytes()).unwrap();
    }
}
