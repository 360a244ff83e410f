//! The pages that a running guest still lacks, after a switchover with post-copy.
//!
//! The guest's memory is registered with userfaultfd. A page that the guest touches is requested
//! from the source, unless it was never populated there: then it is placed as zeros at once. Pages
//! are also requested in the background, and whichever copy comes first is placed. The guest at the
//! source is paused, so both are the same.

mod set;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use vmferry_codec::{DecodedPages, PageHashes};
use vmferry_faults::{FaultRanges, Wake};
use vmferry_memory::{GuestMemory, PAGE_SIZE, PageRun, SlotId};

use super::fetch::counts::{FetchCounts, PageWaits};
use crate::error::MigrateError;
pub use set::{FaultAt, MissingRuns, MissingSet, PART_PAGES};

/// The missing pages of a guest.
pub struct MissingPages {
    memory: GuestMemory,
    hashes: Arc<PageHashes>,
    ranges: FaultRanges,
    state: Mutex<State>,
}

struct State {
    set: MissingSet,
    phase: Phase,
    /// When each page was requested that a thread waits for.
    waits: HashMap<(SlotId, u64), Instant>,
    counts: FetchCounts,
    waited: PageWaits,
}

/// Whether missing pages may be given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The VMM loads the guest's state. If the source is lost, this session can't succeed.
    Loading,
    /// The guest may run here, or already does. Nothing that is missing is given up.
    Loaded,
    /// The source was lost while the state was loaded. Threads that wait continue with zeros, and
    /// the guest never runs.
    GivenUp,
}

impl MissingPages {
    /// The missing pages must be free, and their hashes forgotten. From now on threads that touch a
    /// page which is not there wait until it is placed. `register` registers the memory. The guest
    /// must not run yet, and nothing else may be placing its pages.
    ///
    /// # Errors
    /// Errors of `register`.
    pub fn register(
        memory: GuestMemory,
        hashes: Arc<PageHashes>,
        missing: MissingSet,
        register: impl FnOnce(&GuestMemory) -> Result<FaultRanges, MigrateError>,
    ) -> Result<Self, MigrateError> {
        let ranges = register(&memory)?;
        let state = Mutex::new(State {
            set: missing,
            phase: Phase::Loading,
            waits: HashMap::new(),
            counts: FetchCounts::default(),
            waited: PageWaits::default(),
        });
        Ok(Self { memory, hashes, ranges, state })
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

    /// Number of pages that are still missing.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.state.lock().set.left()
    }

    /// Whether any of these pages is missing.
    #[must_use]
    pub fn has_any(&self, run: PageRun) -> bool {
        let state = self.state.lock();
        parts(run).any(|(part, _)| state.set.missing_of(part).next().is_some())
    }

    /// What has happened so far, and how long threads waited.
    #[must_use]
    pub fn counts(&self) -> (FetchCounts, PageWaits) {
        let state = self.state.lock();
        (state.counts, state.waited.clone())
    }

    /// Handles a fault at a host-virtual address of the guest's memory. Returns the page to request
    /// from the source, if it was not requested before.
    ///
    /// # Errors
    /// Errors of userfaultfd.
    pub fn fault(&self, address: u64) -> Result<Option<(SlotId, u64)>, MigrateError> {
        let Some(range) = self.ranges.range_at(address) else { return Ok(None) };
        let (slot, page) = (range.slot, range.page_at(address));
        {
            let mut state = self.state.lock();
            state.counts.faults += 1;
            if state.phase != Phase::GivenUp {
                match state.set.fault(slot, page) {
                    FaultAt::Unrequested => {
                        state.waits.insert((slot, page), Instant::now());
                        return Ok(Some((slot, page)));
                    }
                    FaultAt::Awaited => return Ok(None),
                    FaultAt::Present => {}
                }
            }
        }
        // Never populated at the source, placed since the guest touched it, or given up. A page
        // that exists is left as it is, and the threads that wait for it are woken.
        let placed = self.ranges.place_zeros(PageRun { slot, first: page, pages: 1 }, Wake::Now)?;
        if placed.placed_bytes > 0 {
            self.state.lock().counts.zero_faults += 1;
        }
        Ok(None)
    }

    /// The requested pages that threads still wait for: after a channel was lost, its answers may
    /// be lost too.
    #[must_use]
    pub fn awaited(&self) -> Vec<(SlotId, u64)> {
        self.state.lock().set.awaited()
    }

    /// The next pages to request in the background, at most this number.
    #[must_use]
    pub fn queue_next(&self, most: u64) -> Option<PageRun> {
        self.state.lock().set.queue_next(most)
    }

    /// The answers to these background requests will not come.
    pub fn unqueue(&self, runs: impl IntoIterator<Item = PageRun>) {
        let mut state = self.state.lock();
        runs.into_iter().for_each(|run| state.set.unqueue(run));
    }

    /// Places the pages of a frame that are missing, and wakes the threads that wait for them.
    /// Pages that are there already are left as they are: the guest may have written them. Returns
    /// whether the last missing page was one of them.
    ///
    /// # Errors
    /// Errors of userfaultfd.
    pub fn place(&self, decoded: DecodedPages<'_>) -> Result<bool, MigrateError> {
        let mut last = false;
        for (run, content) in decoded.runs() {
            for (part, at) in parts(run) {
                let missing = self.state.lock().set.missing_of(part);
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
                self.state.lock().counts.again_pages += again;
            }
        }
        decoded.record(&self.hashes);
        Ok(last)
    }

    /// Records that pages are there. Returns whether none is missing any more, once.
    fn placed(&self, run: PageRun) -> bool {
        let mut state = self.state.lock();
        let State { set, waits, counts, waited, .. } = &mut *state;
        set.placed(run, |page| match waits.remove(&(run.slot, page)) {
            Some(since) => {
                counts.fault_pages += 1;
                waited.record(since.elapsed());
            }
            None => counts.background_pages += 1,
        })
    }

    /// The VMM has loaded the state. Returns whether no page that it needed was given up; from then
    /// on no page is.
    #[must_use]
    pub fn end_load(&self) -> bool {
        let mut state = self.state.lock();
        let whole = state.phase != Phase::GivenUp;
        if whole {
            state.phase = Phase::Loaded;
        }
        whole
    }

    /// A channel was lost. If the VMM is still loading the state it may wait for a page that will
    /// never come. Then it continues with zeros, and this guest can't run any more. Nothing happens
    /// after the load.
    ///
    /// # Errors
    /// Errors of userfaultfd.
    pub fn give_up_load(&self) -> Result<(), MigrateError> {
        let awaited = {
            let mut state = self.state.lock();
            if state.phase != Phase::Loading {
                return Ok(());
            }
            state.phase = Phase::GivenUp;
            state.set.awaited()
        };
        for (slot, page) in awaited {
            self.ranges.place_zeros(PageRun { slot, first: page, pages: 1 }, Wake::Now)?;
        }
        Ok(())
    }

    /// Ends the registration. Every page must be there, or the guest is discarded.
    ///
    /// # Errors
    /// Errors of userfaultfd.
    pub fn finish(&self) -> Result<(), MigrateError> {
        Ok(self.ranges.unregister()?)
    }
}

/// Divides a run into parts of at most [`PART_PAGES`]. Returns each with its offset in the run.
fn parts(run: PageRun) -> impl Iterator<Item = (PageRun, u64)> {
    (0..run.pages).step_by(PART_PAGES as usize).map(move |at| {
        let pages = PART_PAGES.min(run.pages - at);
        (PageRun { first: run.first + at, pages, ..run }, at)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_a_run_without_gaps() {
        let run = PageRun { slot: SlotId(0), first: 7, pages: 130 };
        let found: Vec<_> = parts(run).map(|(part, at)| (part.first, part.pages, at)).collect();
        assert_eq!(found, [(7, 64, 0), (71, 64, 64), (135, 2, 128)]);
    }
}
