//! Which pages are missing, which of them were requested, and which to request next.

use vmferry_memory::{PageRun, PageSet, SlotId};

/// The missing pages of a guest. Uses neither threads nor time, so that the simulator can share it.
#[derive(Debug)]
pub struct MissingSet {
    /// Pages that only the source has.
    missing: PageSet,
    /// Those of them that were requested because a thread of the guest waits.
    awaited: PageSet,
    /// Those of them that were requested in the background.
    queued: PageSet,
    /// Number of missing pages.
    left: u64,
    /// Number of missing pages that were not requested at all.
    unrequested: u64,
    /// Where the background goes on: after the last fault, or after its own last request.
    next: (usize, u64),
}

/// What a fault of the guest means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultAt {
    /// The page is missing and must be requested now.
    Unrequested,
    /// The page is missing, and was requested for a thread that waits.
    Awaited,
    /// The page is not missing.
    Present,
}

/// Number of pages that are looked at together: the bits of a word.
pub const PART_PAGES: u64 = u64::BITS as u64;

impl MissingSet {
    /// These pages are missing, and none of them was requested.
    #[must_use]
    pub fn new(missing: PageSet) -> Self {
        let left = missing.count();
        let (mut awaited, mut queued) = (missing.clone(), missing.clone());
        awaited.clear_all();
        queued.clear_all();
        Self { missing, awaited, queued, left, unrequested: left, next: (0, 0) }
    }

    /// Number of missing pages.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.left
    }

    /// A thread of the guest waits for a page. The background continues after it, because the guest
    /// often touches the pages that follow.
    pub fn fault(&mut self, slot: SlotId, page: u64) -> FaultAt {
        if !self.missing.bitmap(slot).is_set(page) {
            return FaultAt::Present;
        }
        self.next = (usize::from(slot.0), page + 1);
        if self.awaited.bitmap(slot).is_set(page) {
            return FaultAt::Awaited;
        }
        // Requested again even if it is queued: its answer would come after those of other pages.
        self.unrequested -= u64::from(!self.queued.bitmap(slot).is_set(page));
        self.awaited.bitmap_mut(slot).set(page);
        FaultAt::Unrequested
    }

    /// A thread of the guest waits for all pages of a part. Appends those that must be requested
    /// now.
    pub fn fault_all(&mut self, part: PageRun, requests: &mut Vec<PageRun>) {
        for found in self.missing_of(part) {
            for page in found.first..found.first + found.pages {
                if self.fault(part.slot, page) != FaultAt::Unrequested {
                    continue;
                }
                match requests.last_mut() {
                    Some(last)
                        if last.slot == part.slot
                            && last.first >= part.first
                            && last.first + last.pages == page =>
                    {
                        last.pages += 1;
                    }
                    _ => requests.push(PageRun { slot: part.slot, first: page, pages: 1 }),
                }
            }
        }
    }

    /// The missing pages of a slot.
    pub fn runs(&self, slot: SlotId) -> impl Iterator<Item = PageRun> + '_ {
        let runs = self.missing.bitmap(slot).runs();
        runs.map(move |(first, pages)| PageRun { slot, first, pages })
    }

    /// The pages that threads wait for, in runs of at most [`PART_PAGES`].
    #[must_use]
    pub fn awaited(&self) -> Vec<PageRun> {
        self.awaited.runs().flat_map(|run| parts(run).map(|(part, _)| part)).collect()
    }

    /// The next pages to request in the background, at most this number of adjacent ones. They are
    /// queued from now on.
    pub fn queue_next(&mut self, most: u64) -> Option<PageRun> {
        if self.unrequested == 0 {
            return None;
        }
        let (slot, page) = self.next;
        let run = self.unrequested_from(slot, page).or_else(|| {
            let slots = self.missing.iter().count();
            // Once around: the rest of the slots, and then from the first one.
            (slot + 1..slots).chain(0..=slot).find_map(|slot| self.unrequested_from(slot, 0))
        })?;
        let run = PageRun { pages: run.pages.min(most), ..run };
        self.queued.bitmap_mut(run.slot).set_run(run.first, run.pages);
        self.unrequested -= run.pages;
        self.next = (usize::from(run.slot.0), run.first + run.pages);
        Some(run)
    }

    /// The first unrequested pages of a slot from a page on, all in one word.
    fn unrequested_from(&self, slot: usize, page: u64) -> Option<PageRun> {
        let id = SlotId(u16::try_from(slot).ok()?);
        let [missing, awaited, queued] =
            [&self.missing, &self.awaited, &self.queued].map(|set| set.bitmap(id).words());
        let first = (page / PART_PAGES) as usize;
        for word in first..missing.len() {
            let mut bits = missing[word] & !awaited[word] & !queued[word];
            if word == first {
                bits &= u64::MAX << (page % PART_PAGES);
            }
            if bits != 0 {
                let offset = bits.trailing_zeros();
                let pages = u64::from((bits >> offset).trailing_ones());
                let first = word as u64 * PART_PAGES + u64::from(offset);
                return Some(PageRun { slot: id, first, pages });
            }
        }
        None
    }

    /// The answer to a request of the background will not come.
    pub fn unqueue(&mut self, run: PageRun) {
        for page in run.first..run.first + run.pages {
            let is_set = |set: &PageSet| set.bitmap(run.slot).is_set(page);
            if is_set(&self.queued) && is_set(&self.missing) && !is_set(&self.awaited) {
                self.unrequested += 1;
            }
        }
        self.queued.bitmap_mut(run.slot).clear_run(run.first, run.pages);
    }

    /// The missing pages of a part of at most [`PART_PAGES`] pages.
    #[must_use]
    pub fn missing_of(&self, part: PageRun) -> MissingRuns {
        let bitmap = self.missing.bitmap(part.slot);
        let bits = (0..part.pages.min(PART_PAGES))
            .filter(|offset| bitmap.is_set(part.first + offset))
            .fold(0, |bits, offset| bits | 1 << offset);
        MissingRuns { part, bits }
    }

    /// Records that pages are there. Calls `each` with those of them that were missing until now.
    /// Returns whether none is missing any more, once.
    pub fn placed(&mut self, run: PageRun, mut each: impl FnMut(u64)) -> bool {
        let before = self.left;
        for page in run.first..run.first + run.pages {
            // Another thread may have placed the same page meanwhile.
            if !self.missing.bitmap(run.slot).is_set(page) {
                continue;
            }
            let is_set = |set: &PageSet| set.bitmap(run.slot).is_set(page);
            self.unrequested -= u64::from(!is_set(&self.awaited) && !is_set(&self.queued));
            self.left -= 1;
            each(page);
        }
        for set in [&mut self.missing, &mut self.awaited, &mut self.queued] {
            set.bitmap_mut(run.slot).clear_run(run.first, run.pages);
        }
        before > 0 && self.left == 0
    }
}

/// Divides a run into parts of at most [`PART_PAGES`]. Returns each with its offset in the run.
pub(super) fn parts(run: PageRun) -> impl Iterator<Item = (PageRun, u64)> {
    (0..run.pages).step_by(PART_PAGES as usize).map(move |at| {
        let pages = PART_PAGES.min(run.pages - at);
        (PageRun { first: run.first + at, pages, ..run }, at)
    })
}

/// The missing pages of a part, as runs.
#[derive(Clone, Copy, Debug)]
pub struct MissingRuns {
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
    use proptest::prelude::*;
    use vmferry_memory::SlotLayout;

    use super::*;

    const SLOTS: [u64; 2] = [200, 70];

    fn set_of(pages: impl IntoIterator<Item = (u16, u64)>) -> MissingSet {
        let layout: Vec<SlotLayout> = (0..)
            .zip(SLOTS)
            .map(|(slot, pages)| SlotLayout {
                slot: SlotId(slot),
                gpa: u64::from(slot) << 32,
                pages,
            })
            .collect();
        let mut set = PageSet::for_layout(&layout);
        pages.into_iter().for_each(|(slot, page)| set.bitmap_mut(SlotId(slot)).set(page));
        MissingSet::new(set)
    }

    fn page(slot: u16, first: u64) -> PageRun {
        PageRun { slot: SlotId(slot), first, pages: 1 }
    }

    #[test]
    fn parts_cover_a_run_without_gaps() {
        let run = PageRun { slot: SlotId(0), first: 7, pages: 130 };
        let found: Vec<_> = parts(run).map(|(part, at)| (part.first, part.pages, at)).collect();
        assert_eq!(found, [(7, 64, 0), (71, 64, 64), (135, 2, 128)]);
    }

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
    fn background_follows_the_last_fault_and_goes_around() {
        let mut set = set_of((0..200).map(|page| (0, page)).chain([(1, 5)]));
        let queued =
            |set: &mut MissingSet| set.queue_next(64).map(|run| (run.slot.0, run.first, run.pages));
        assert_eq!(queued(&mut set), Some((0, 0, 64)));
        assert_eq!(set.fault(SlotId(0), 150), FaultAt::Unrequested);
        assert_eq!(queued(&mut set), Some((0, 151, 41)), "to the end of the word");
        assert_eq!(queued(&mut set), Some((0, 192, 8)));
        assert_eq!(queued(&mut set), Some((1, 5, 1)));
        assert_eq!(queued(&mut set), Some((0, 64, 64)));
        assert_eq!(queued(&mut set), Some((0, 128, 22)));
        assert_eq!(queued(&mut set), None);
    }

    #[test]
    fn queued_page_is_requested_again_for_a_fault_and_only_once() {
        let mut set = set_of([(0, 7)]);
        assert_eq!(set.queue_next(64), Some(page(0, 7)));
        assert_eq!(set.fault(SlotId(0), 7), FaultAt::Unrequested);
        assert_eq!(set.fault(SlotId(0), 7), FaultAt::Awaited);
        set.unqueue(page(0, 7));
        assert_eq!(set.queue_next(64), None, "the answer to the fault's request will come");
        assert_eq!(set.awaited(), [page(0, 7)]);
        assert!(set.placed(page(0, 7), |_| {}));
        assert!(!set.placed(page(0, 7), |_| {}), "reported once");
        assert_eq!(set.fault(SlotId(0), 7), FaultAt::Present);
    }

    #[test]
    fn request_without_an_answer_is_made_again() {
        let mut set = set_of([(0, 7), (0, 8), (0, 9)]);
        let run = set.queue_next(64).unwrap();
        set.placed(page(0, 8), |_| {});
        set.unqueue(run);
        assert_eq!(set.queue_next(64), Some(page(0, 7)));
        assert_eq!(set.queue_next(64), Some(page(0, 9)));
        assert_eq!(set.queue_next(64), None);
    }

    /// An operation on the set, on any pages.
    #[derive(Clone, Debug)]
    enum Operation {
        Fault(u16, u64),
        Queue(u64),
        Unqueue(usize),
        Place(u16, u64, u64),
    }

    fn operation() -> impl Strategy<Value = Operation> {
        prop_oneof![
            (0..2_u16, 0..70_u64).prop_map(|(slot, page)| Operation::Fault(slot, page)),
            (1..65_u64).prop_map(Operation::Queue),
            (0..9_usize).prop_map(Operation::Unqueue),
            (0..2_u16, 0..60_u64, 1..10_u64).prop_map(|(s, p, n)| Operation::Place(s, p, n)),
        ]
    }

    proptest! {
        /// The counts are those of the sets, and the background reaches every page.
        #[test]
        fn counts_are_right_after_any_operations(
            missing in prop::collection::vec((0..2_u16, 0..70_u64), 0..90),
            operations in prop::collection::vec(operation(), 0..60),
        ) {
            let mut set = set_of(missing);
            let mut requests: Vec<PageRun> = Vec::new();
            for operation in operations {
                match operation {
                    Operation::Fault(slot, page) => { set.fault(SlotId(slot), page); }
                    Operation::Queue(most) => requests.extend(set.queue_next(most)),
                    Operation::Unqueue(which) if which < requests.len() => {
                        set.unqueue(requests.swap_remove(which));
                    }
                    Operation::Unqueue(_) => {}
                    Operation::Place(slot, first, pages) => {
                        set.placed(PageRun { slot: SlotId(slot), first, pages }, |_| {});
                    }
                }
                prop_assert_eq!(set.left, set.missing.count());
                let mut unrequested = set.missing.clone();
                unrequested.subtract(&set.awaited);
                unrequested.subtract(&set.queued);
                prop_assert_eq!(set.unrequested, unrequested.count());
            }
            while let Some(run) = set.queue_next(64) {
                requests.push(run);
            }
            prop_assert_eq!(set.unrequested, 0);
            for run in set.awaited() {
                set.placed(run, |_| {});
            }
            for run in requests {
                set.placed(run, |_| {});
            }
            prop_assert_eq!(set.left(), 0);
        }
    }
}
