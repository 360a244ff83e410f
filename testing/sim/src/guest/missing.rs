//! The pages that a guest lacks after a switchover with post-copy, and its vCPUs that wait for
//! them.

use vmferry::data::destination::missing::{FaultAt, MissingSet};
use vmferry_memory::{PAGE_SIZE, PageRun, PageSet, SlotId};

use super::{Guest, Page, State, gpa_of};

/// The vCPUs of the guest. Each may wait for one page.
const VCPUS: usize = 3;

/// What a guest has fetched while it ran at the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fetched {
    /// Missing pages that have arrived.
    pub pages: u64,
    /// Pages that were requested because a vCPU waited.
    pub faults: u64,
    /// Pages that arrived although they were there already.
    pub again: u64,
}

/// The missing pages of the guest at the destination.
#[derive(Default)]
pub struct Missing {
    /// `None` for a guest that has never lacked any.
    set: Option<MissingSet>,
    /// The pages that vCPUs wait for.
    waiting: Vec<Page>,
    /// Those of them that nobody has requested.
    unhandled: Vec<Page>,
}

impl Missing {
    /// Whether only the source has a page.
    pub fn has(&self, page: Page) -> bool {
        let run = PageRun { slot: SlotId(page.0), first: page.1, pages: 1 };
        self.set.as_ref().is_some_and(|set| set.missing_of(run).next().is_some())
    }

    /// Whether the guest has ever lacked pages.
    pub fn is_known(&self) -> bool {
        self.set.is_some()
    }

    /// Number of missing pages.
    pub fn left(&self) -> u64 {
        self.set.as_ref().map_or(0, MissingSet::left)
    }

    /// A vCPU touches a missing page, and waits for it.
    pub fn touch(&mut self, page: Page) {
        self.waiting.push(page);
        self.unhandled.push(page);
    }

    /// Whether every vCPU waits for a page.
    pub fn stops_the_guest(&self) -> bool {
        self.waiting.len() >= VCPUS
    }
}

impl Guest {
    /// These pages are missing. From now on the guest waits when it touches one.
    pub fn lack(&self, pages: PageSet) {
        let mut state = self.lock();
        state.missing = Missing { set: Some(MissingSet::new(pages)), ..Missing::default() };
        state.count_missing();
    }

    /// A process takes over from one that has died: all pages that are not populated are missing,
    /// and the vCPUs that wait touch their pages again. Returns their number. With `forgets` none
    /// is missing, which no correct destination believes.
    pub fn adopt(&self, forgets: bool) -> u64 {
        let mut state = self.lock();
        let Some(memory) = &state.memory else { return 0 };
        let mut missing = PageSet::for_memory(memory);
        if !forgets {
            for slot in memory.slots() {
                missing.bitmap_mut(slot.id()).set_run(0, slot.pages());
            }
            missing.subtract(&memory.populated().expect("a page table can be read"));
        }
        let pages = missing.count();
        let waiting = std::mem::take(&mut state.missing.waiting);
        state.missing =
            Missing { set: Some(MissingSet::new(missing)), unhandled: waiting.clone(), waiting };
        pages
    }

    /// Whether it runs and lacks pages.
    pub fn is_fetching(&self) -> bool {
        let state = self.lock();
        state.running && state.missing.left() > 0
    }

    /// Number of pages that it lacks.
    pub fn left(&self) -> u64 {
        self.lock().missing.left()
    }

    /// Whether it lacks any of these pages.
    pub fn lacks(&self, run: PageRun) -> bool {
        let missing = &self.lock().missing;
        (run.first..run.first + run.pages).any(|page| missing.has((run.slot.0, page)))
    }

    /// The pages that its vCPUs have touched since the last call, as far as they must be requested.
    pub fn take_faults(&self) -> Vec<PageRun> {
        let mut state = self.lock();
        let Missing { set: Some(set), unhandled, .. } = &mut state.missing else {
            return Vec::new();
        };
        let mut pages = std::mem::take(unhandled);
        pages.retain(|&(slot, page)| set.fault(SlotId(slot), page) == FaultAt::Unrequested);
        state.ledger.lock().fetched.faults += pages.len() as u64;
        let run = |(slot, first)| PageRun { slot: SlotId(slot), first, pages: 1 };
        pages.into_iter().map(run).collect()
    }

    /// The requested pages that its vCPUs wait for.
    pub fn awaited(&self) -> Vec<PageRun> {
        self.lock().missing.set.as_ref().map_or_else(Vec::new, MissingSet::awaited)
    }

    /// The next pages to request in the background.
    pub fn queue_next(&self, most: u64) -> Option<PageRun> {
        self.lock().missing.set.as_mut()?.queue_next(most)
    }

    /// The answer to a request of the background will not come.
    pub fn unqueue(&self, run: PageRun) {
        if let Some(set) = &mut self.lock().missing.set {
            set.unqueue(run);
        }
    }

    /// Places the pages of a run that are missing; without content they are zero. The vCPUs that
    /// wait for them continue. With `late` pages that are there already are placed too, which no
    /// correct destination does. Returns whether the last missing page was one of them.
    pub fn arrive(&self, run: PageRun, content: Option<&[u8]>, late: bool) -> bool {
        let mut state = self.lock();
        let zeros = [0; PAGE_SIZE];
        let mut last = false;
        for (page, offset) in (run.first..run.first + run.pages).zip((0..).step_by(PAGE_SIZE)) {
            let page = (run.slot.0, page);
            let bytes = content.map_or(&zeros[..], |content| &content[offset..offset + PAGE_SIZE]);
            if state.missing.has(page) {
                last |= state.place(page, bytes);
                continue;
            }
            state.ledger.lock().fetched.again += 1;
            if late && let Some(memory) = &state.memory {
                // A page outside the guest was refused before.
                let _ = memory.write_at(gpa_of(page), bytes);
            }
        }
        state.count_missing();
        last
    }

    /// The source frees the guest's memory.
    pub fn is_released(&self) {
        let state = self.lock();
        let mut ledger = state.ledger.lock();
        if ledger.lacking > 0 {
            let text = format!("the source frees {} pages that the guest lacks", ledger.lacking);
            ledger.violations.push(text);
        }
    }
}

impl State {
    /// Places a missing page, and lets the vCPUs that wait for it write.
    fn place(&mut self, page: Page, bytes: &[u8]) -> bool {
        let Some(memory) = &self.memory else { return false };
        if memory.write_at(gpa_of(page), bytes).is_err() {
            return false;
        }
        self.ledger.lock().fetched.pages += 1;
        let run = PageRun { slot: SlotId(page.0), first: page.1, pages: 1 };
        let last = self.missing.set.as_mut().is_some_and(|set| set.placed(run, |_| {}));
        if let Err(text) = self.check_page(page) {
            let text = format!("a page that arrived differs: {text}");
            self.ledger.lock().violations.push(text);
        }
        let before = self.missing.waiting.len();
        self.missing.waiting.retain(|waiting| *waiting != page);
        self.missing.unhandled.retain(|waiting| *waiting != page);
        for _ in self.missing.waiting.len()..before {
            let version = self.next_version;
            self.next_version += 1;
            self.store(page, version);
        }
        last
    }

    /// The ledger learns how many pages the guest lacks.
    pub(super) fn count_missing(&self) {
        self.ledger.lock().lacking = self.missing.left();
    }
}
