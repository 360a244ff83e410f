//! The pages that a running guest still lacks, after a switchover with post-copy.
//!
//! The guest's memory is registered with userfaultfd. A page that the guest touches is requested
//! from the source, unless it was never populated there: then it is placed as zeros at once. Pages
//! are also requested in the background, and whichever copy comes first is placed. The guest at the
//! source is paused, so both are the same.

mod huge;
mod set;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vmferry_codec::{DecodedPages, PageHashes};
use vmferry_faults::{FaultRanges, Wake};
use vmferry_memory::{GuestMemory, MemoryError, PAGE_SIZE, PageRun, PageSet, SlotId};

use super::fetch::counts::{FetchCounts, PageWaits};
use crate::error::MigrateError;
use crate::vmm::left::LeftMemory;
use set::parts;
pub use set::{FaultAt, MissingRuns, MissingSet, PART_PAGES};

/// The missing pages of a guest.
pub struct MissingPages {
    memory: GuestMemory,
    hashes: Arc<PageHashes>,
    ranges: FaultRanges,
    /// Held while parts of huge pages are written. Taken before `state`.
    huge_pages: Mutex<()>,
    state: Mutex<State>,
}

struct State {
    set: MissingSet,
    phase: Phase,
    /// When each page was requested that a thread waits for. A huge page is known by its first one.
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
    /// The missing pages must be free, or on hugetlbfs, and their hashes forgotten. From now on
    /// threads that touch a page which is not there wait until it is placed. `register` registers
    /// the memory. The guest must not run yet, and nothing else may be placing its pages.
    ///
    /// # Errors
    /// Errors of `register`, and of freeing pages.
    pub fn register(
        memory: GuestMemory,
        hashes: Arc<PageHashes>,
        missing: PageSet,
        register: impl FnOnce(&GuestMemory) -> Result<FaultRanges, MigrateError>,
    ) -> Result<Self, MigrateError> {
        let ranges = register(&memory)?;
        free_present(&memory, &missing, |run| memory.discard(run).map(drop))?;
        Self::of(memory, hashes, missing, ranges)
    }

    fn of(
        memory: GuestMemory,
        hashes: Arc<PageHashes>,
        missing: PageSet,
        ranges: FaultRanges,
    ) -> Result<Self, MigrateError> {
        let missing = MissingSet::new(missing);
        huge::hide_incomplete(&memory, &ranges, &missing)?;
        let state = Mutex::new(State {
            set: missing,
            phase: Phase::Loading,
            waits: HashMap::new(),
            counts: FetchCounts::default(),
            waited: PageWaits::default(),
        });
        Ok(Self { memory, hashes, ranges, huge_pages: Mutex::new(()), state })
    }

    /// Takes over from a process that has died while the guest ran. All pages that may be missing
    /// are, in memory that is still registered. The threads that wait touch their pages again.
    ///
    /// # Errors
    /// Errors of userfaultfd.
    pub fn adopt(left: LeftMemory) -> Result<Self, MigrateError> {
        let LeftMemory { memory, ranges, .. } = left;
        let hashes = Arc::new(PageHashes::for_memory(&memory));
        let mut missing = PageSet::for_memory(&memory);
        for slot in memory.slots() {
            missing.bitmap_mut(slot.id()).set_run(0, slot.pages());
        }
        missing.subtract(&memory.populated()?);
        let mut adopted = Self::of(memory, hashes, missing, ranges)?;
        adopted.state.get_mut().phase = Phase::Loaded;
        adopted.ranges.wake_all()?;
        Ok(adopted)
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

    /// Handles a fault at a host-virtual address of the guest's memory. Appends the pages to
    /// request from the source, unless they were requested before.
    ///
    /// # Errors
    /// Errors of userfaultfd.
    pub fn fault(&self, address: u64, requests: &mut Vec<PageRun>) -> Result<(), MigrateError> {
        let Some(range) = self.ranges.range_at(address) else { return Ok(()) };
        let (slot, page) = (range.slot, range.page_at(address));
        if self.ranges.unit_pages(slot) > 1 {
            return self.fault_in_huge_page(slot, page, requests);
        }
        let run = PageRun { slot, first: page, pages: 1 };
        {
            let mut state = self.state.lock();
            state.counts.faults += 1;
            if state.phase != Phase::GivenUp {
                match state.set.fault(slot, page) {
                    FaultAt::Unrequested => {
                        state.waits.insert((slot, page), Instant::now());
                        requests.push(run);
                        return Ok(());
                    }
                    FaultAt::Awaited => return Ok(()),
                    FaultAt::Present => {}
                }
            }
        }
        // Never populated at the source, placed since the guest touched it, or given up. A page
        // that exists is left as it is, and the threads that wait for it are woken.
        if self.ranges.place_zeros(run, Wake::Now)?.placed_bytes > 0 {
            self.state.lock().counts.zero_faults += 1;
        }
        Ok(())
    }

    /// The requested pages that threads still wait for: after a channel was lost, its answers may
    /// be lost too.
    #[must_use]
    pub fn awaited(&self) -> Vec<PageRun> {
        self.state.lock().set.awaited()
    }

    /// Number of missing pages that threads wait for, and for how long the first has waited. A huge
    /// page counts once.
    #[must_use]
    pub fn awaited_now(&self) -> (u64, Duration) {
        let state = self.state.lock();
        let first = state.waits.values().min();
        let waited = first.map_or(Duration::ZERO, |since| since.elapsed());
        (state.waits.len() as u64, waited)
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
            let is_huge = self.ranges.unit_pages(run.slot) > 1;
            for (part, at) in parts(run) {
                // Writing is not atomic as placing is: no two threads may write the same page, and
                // none may write it once it is shown.
                let writing = is_huge.then(|| self.huge_pages.lock());
                let missing = self.state.lock().set.missing_of(part);
                for found in missing {
                    let content = content.map(|content| {
                        let from = (at + found.first - part.first) as usize * PAGE_SIZE;
                        &content[from..from + found.pages as usize * PAGE_SIZE]
                    });
                    match content {
                        _ if is_huge => self.ranges.write_hidden(found, content)?,
                        Some(content) => {
                            self.ranges.place(found, content, Wake::Now)?;
                        }
                        None => {
                            self.ranges.place_zeros(found, Wake::Now)?;
                        }
                    }
                    last |= self.placed(found);
                }
                if is_huge {
                    self.show_complete(part)?;
                }
                drop(writing);
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
        let unit = self.ranges.unit_pages(run.slot);
        if unit > 1 {
            return set.placed(run, |page| {
                let is_awaited = waits.contains_key(&(run.slot, page / unit * unit));
                if is_awaited {
                    counts.fault_pages += 1;
                } else {
                    counts.background_pages += 1;
                }
            });
        }
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
        for run in awaited {
            if self.ranges.unit_pages(run.slot) > 1 {
                self.ranges.show(huge::whole(&self.ranges, run))?;
            } else {
                self.ranges.place_zeros(run, Wake::Now)?;
            }
        }
        Ok(())
    }

    /// Whether the registration can end: no page is missing, or the guest can't run here any more
    /// because its state was not loaded.
    #[must_use]
    pub fn is_needless(&self) -> bool {
        let state = self.state.lock();
        state.phase != Phase::Loaded || state.set.left() == 0
    }

    /// Ends the registration. Every page must be there, or the guest is discarded.
    ///
    /// # Errors
    /// Errors of userfaultfd.
    pub fn finish(&self) -> Result<(), MigrateError> {
        Ok(self.ranges.unregister()?)
    }
}

/// Frees missing pages that are there. The kernel can have made them since they were freed:
/// khugepaged fills the holes of a huge page with zeros, until the memory is registered. Such a
/// page would cause no fault, and the guest would read zeros. So would a page that the kernel has
/// only zeroed, because it could not split the huge page around it.
fn free_present(
    memory: &GuestMemory,
    missing: &PageSet,
    mut free: impl FnMut(PageRun) -> Result<(), MemoryError>,
) -> Result<(), MigrateError> {
    let present = memory.present_among(missing)?;
    if present.is_empty() {
        return Ok(());
    }
    for run in present.runs() {
        free(run)?;
    }
    match memory.present_among(&present)?.count() {
        0 => Ok(()),
        pages => Err(MemoryError::NotFreed { pages }.into()),
    }
}

#[cfg(test)]
mod tests {
    use vmferry_memory::{MemoryKind, SlotLayout};

    use super::*;

    #[test]
    fn page_that_the_kernel_does_not_free_ends_the_session() {
        for kind in [MemoryKind::Private, MemoryKind::Memfd] {
            let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: 64 }];
            let memory = GuestMemory::allocate(&layout, kind).unwrap();
            let mut missing = PageSet::for_memory(&memory);
            missing.bitmap_mut(SlotId(0)).set_run(3, 5);
            for page in [3, 4, 7, 9] {
                memory.write_at(page * PAGE_SIZE as u64, &[1]).unwrap();
            }
            let kept = free_present(&memory, &missing, |_| Ok(()));
            let error = kept.unwrap_err();
            assert!(matches!(error, MigrateError::Memory(MemoryError::NotFreed { pages: 3 })));
            free_present(&memory, &missing, |run| memory.discard(run).map(drop)).unwrap();
            let freed = |_| panic!("nothing is left to be freed");
            free_present(&memory, &missing, freed).unwrap();
            assert_eq!(memory.populated().unwrap().count(), 1, "{kind}");
        }
    }
}
