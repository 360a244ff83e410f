//! The pages that a running guest still lacks, after a switchover with post-copy.
//!
//! The guest's memory is registered with userfaultfd. A page that the guest touches is requested
//! from the source, unless it was never populated there: then it is placed as zeros at once. Pages
//! arrive as answers and in the background, and whichever copy comes first is placed. The guest at
//! the source is paused, so both are the same.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use vmferry_codec::{DecodedPages, PageHashes, PlacedPages};
use vmferry_faults::{FaultRanges, Wake};
use vmferry_memory::{GuestMemory, PAGE_SIZE, PageRun, PageSet, SlotId};

use crate::error::MigrateError;

/// The missing pages of a guest.
pub struct MissingPages {
    memory: GuestMemory,
    hashes: Arc<PageHashes>,
    ranges: FaultRanges,
    state: Mutex<State>,
    counters: FetchCounters,
}

/// Which pages are missing.
struct State {
    /// Pages that only the source has.
    missing: PageSet,
    /// Those of them that were requested.
    requested: PageSet,
    /// Number of missing pages.
    left: u64,
}

/// What has happened so far.
#[derive(Debug, Default)]
pub struct FetchCounters {
    /// Faults of the guest.
    pub faults: AtomicU64,
    /// Faults at pages that were never populated at the source, which were placed as zeros.
    pub zero_faults: AtomicU64,
    /// Pages that arrived although they were there already.
    pub again: AtomicU64,
}

/// What a fault of the guest asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// This page, of the source.
    Page(SlotId, u64),
    /// Nothing: the page is there, or was requested before.
    Nothing,
}

impl MissingPages {
    /// Frees outdated versions of the missing pages, and registers the memory in `shares` parts,
    /// each with a descriptor of its own. From now on threads that touch a page which is not there
    /// wait until it is placed. The guest must not run yet, and nothing else may be placing its
    /// pages.
    ///
    /// # Errors
    /// Errors of the memory, or of userfaultfd.
    pub fn register(
        memory: GuestMemory,
        hashes: Arc<PageHashes>,
        missing: PageSet,
        shares: usize,
    ) -> Result<Self, MigrateError> {
        for run in missing.runs() {
            memory.discard(run)?;
        }
        hashes.forget(&missing);
        let ranges = FaultRanges::register(&memory, shares)?;
        let requested = PageSet::for_memory(&memory);
        let state = Mutex::new(State { left: missing.count(), missing, requested });
        Ok(Self { memory, hashes, ranges, state, counters: FetchCounters::default() })
    }

    /// The guest's memory.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// The hashes of the pages that are placed.
    #[must_use]
    pub fn hashes(&self) -> &PageHashes {
        &self.hashes
    }

    /// The registered memory.
    #[must_use]
    pub fn ranges(&self) -> &FaultRanges {
        &self.ranges
    }

    /// What has happened so far.
    #[must_use]
    pub fn counters(&self) -> &FetchCounters {
        &self.counters
    }

    /// Number of pages that are still missing.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.state.lock().left
    }

    /// Handles a fault at a host-virtual address of the guest's memory.
    ///
    /// # Errors
    /// Errors of userfaultfd.
    pub fn fault(&self, address: u64) -> Result<Wanted, MigrateError> {
        self.counters.faults.fetch_add(1, Ordering::Relaxed);
        let Some(range) = self.ranges.range_at(address) else { return Ok(Wanted::Nothing) };
        let (slot, page) = (range.slot, range.page_at(address));
        {
            let mut state = self.state.lock();
            if state.missing.bitmap(slot).is_set(page) {
                if state.requested.bitmap(slot).is_set(page) {
                    return Ok(Wanted::Nothing);
                }
                state.requested.bitmap_mut(slot).set(page);
                return Ok(Wanted::Page(slot, page));
            }
        }
        // Never populated at the source, or placed since the guest touched it. A page that exists
        // is left as it is, and the threads that wait for it are woken.
        let placed = self.ranges.place_zeros(PageRun { slot, first: page, pages: 1 }, Wake::Now)?;
        if placed.placed_bytes > 0 {
            self.counters.zero_faults.fetch_add(1, Ordering::Relaxed);
        }
        Ok(Wanted::Nothing)
    }

    /// Calls `ask` with the requested pages that are still missing: after a channel was lost, its
    /// answers may be lost too.
    pub fn outstanding(&self, mut ask: impl FnMut(SlotId, u64)) {
        let outstanding = {
            let state = self.state.lock();
            let mut outstanding = PageSet::for_memory(&self.memory);
            outstanding.set_to_intersection(&state.missing, &state.requested);
            outstanding
        };
        for run in outstanding.runs() {
            (run.first..run.first + run.pages).for_each(|page| ask(run.slot, page));
        }
    }

    /// Places the pages of a frame that are missing, and wakes the threads that wait for them.
    /// Pages that are there already are left as they are: the guest may have written them.
    ///
    /// # Errors
    /// Errors of userfaultfd.
    pub fn place(&self, decoded: DecodedPages<'_>) -> Result<Fetched, MigrateError> {
        let mut last = false;
        for (run, content) in decoded.runs() {
            for (part, at) in parts(run) {
                let missing = self.missing_of(part);
                for found in missing {
                    match content {
                        Some(content) => {
                            let from = (at + found.first - part.first) as usize * PAGE_SIZE;
                            let bytes = found.pages as usize * PAGE_SIZE;
                            self.ranges.place(found, &content[from..from + bytes], Wake::Now)?;
                        }
                        None => {
                            self.ranges.place_zeros(found, Wake::Now)?;
                        }
                    }
                    last |= self.placed(found);
                }
                let again = part.pages - missing.into_iter().map(|run| run.pages).sum::<u64>();
                self.counters.again.fetch_add(again, Ordering::Relaxed);
            }
        }
        Ok(Fetched { pages: decoded.record(&self.hashes), is_complete: last })
    }

    /// The missing pages of a part.
    fn missing_of(&self, part: PageRun) -> MissingRuns {
        let state = self.state.lock();
        let bitmap = state.missing.bitmap(part.slot);
        let bits = (0..part.pages)
            .filter(|offset| bitmap.is_set(part.first + offset))
            .fold(0, |bits, offset| bits | 1 << offset);
        MissingRuns { part, bits }
    }

    /// Records that pages are there. Returns whether none is missing any more, once.
    fn placed(&self, run: PageRun) -> bool {
        let mut state = self.state.lock();
        let bitmap = state.missing.bitmap_mut(run.slot);
        // Another thread may have placed the same page meanwhile.
        let pages = (run.first..run.first + run.pages).filter(|page| bitmap.is_set(*page));
        let new = pages.count() as u64;
        bitmap.clear_run(run.first, run.pages);
        state.left -= new;
        new > 0 && state.left == 0
    }

    /// Ends the registration. Every page must be there.
    ///
    /// # Errors
    /// Errors of userfaultfd.
    pub fn finish(&self) -> Result<(), MigrateError> {
        Ok(self.ranges.unregister()?)
    }
}

/// The pages of a frame after they were placed.
#[derive(Clone, Copy, Debug)]
pub struct Fetched {
    /// All pages of the frame.
    pub pages: PlacedPages,
    /// The last missing page was one of them.
    pub is_complete: bool,
}

/// Number of pages that are looked at together: the bits of a word.
const PART_PAGES: u64 = u64::BITS as u64;

/// Divides a run into parts of at most [`PART_PAGES`]. Returns each with its offset in the run.
fn parts(run: PageRun) -> impl Iterator<Item = (PageRun, u64)> {
    (0..run.pages).step_by(PART_PAGES as usize).map(move |at| {
        let pages = PART_PAGES.min(run.pages - at);
        (PageRun { first: run.first + at, pages, ..run }, at)
    })
}

/// The missing pages of a part, as runs.
#[derive(Clone, Copy)]
struct MissingRuns {
    part: PageRun,
    /// One bit for each page of the part.
    bits: u64,
}

impl Iterator for MissingRuns {
    type Item = PageRun;

    fn next(&mut self) -> Option<PageRun> {
        let offset = self.bits.trailing_zeros();
        let pages = self.bits.checked_shr(offset)?.trailing_ones();
        if pages == 0 {
            return None;
        }
        let taken = u64::MAX.checked_shr(u64::BITS - pages).unwrap_or(0) << offset;
        self.bits &= !taken;
        let first = self.part.first + u64::from(offset);
        Some(PageRun { first, pages: pages.into(), ..self.part })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_runs_are_the_runs_of_ones() {
        let part = PageRun { slot: SlotId(1), first: 100, pages: 64 };
        let runs = |bits| {
            let runs = MissingRuns { part, bits };
            runs.map(|run| (run.first, run.pages)).collect::<Vec<_>>()
        };
        assert_eq!(runs(0), []);
        assert_eq!(runs(u64::MAX), [(100, 64)]);
        assert_eq!(runs(0b1101), [(100, 1), (102, 2)]);
        assert_eq!(runs(1 << 63), [(163, 1)]);
    }

    #[test]
    fn parts_cover_a_run_without_gaps() {
        let run = PageRun { slot: SlotId(0), first: 7, pages: 130 };
        let found: Vec<_> = parts(run).map(|(part, at)| (part.first, part.pages, at)).collect();
        assert_eq!(found, [(7, 64, 0), (71, 64, 64), (135, 2, 128)]);
    }
}
