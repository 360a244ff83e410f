//! The plan of a lane: which pages it sends in a round, in which order and in which frames.
//!
//! A lane owns the pages whose number maps to it ([`crate::config::lane_of`]) for the whole
//! migration, so no two versions of a page can overtake each other. Whichever worker is free asks
//! the plan for the next batch of pages. Planning costs almost nothing, and no batch waits to be
//! passed on.

mod progress;

use std::sync::Arc;
use std::time::Duration;

use vmferry_codec::Batch;
use vmferry_dirty::DirtyLog;
use vmferry_memory::traverse::{BLOCK_PAGES, flat_runs};
use vmferry_memory::{PageRun, PageSet, SlotId};

use crate::config::LANE_STRIPE_PAGES;
use crate::config::compression::MOST_FRAME_PAGES;
use crate::error::MigrateError;
use crate::rounds::hinted::Hinted;
use progress::{BlockPages, REARM_WORDS, RoundProgress, Share};

// A lane's stripes are the bitmap's blocks.
const _: () = assert!(LANE_STRIPE_PAGES == BLOCK_PAGES);

/// The pages to send in a round.
#[derive(Clone)]
pub struct RoundOrder {
    /// The round's number, from 1.
    pub round: u32,
    /// The dirty log of the guest's memory.
    pub log: Arc<dyn DirtyLog>,
    /// Whether the guest may write, so that each page must be write-protected again before it is
    /// read.
    pub rearm_first: bool,
    /// All pages of the round. The lane selects its own.
    pub pages: Arc<PageSet>,
    /// The pages of these to send after all others, because they were in the previous round too.
    /// Writes until then cost no additional transfer.
    pub deferred: Option<Arc<PageSet>>,
    /// Pages of these that the guest has freed. They read as zero, and reading them would populate
    /// them again.
    pub zero: Option<Arc<PageSet>>,
    /// Pages that the guest hints free during the round. All pages are write-protected then, and
    /// `rearm_first` is not set.
    pub hinted: Option<Arc<Hinted>>,
}

/// What a lane sends next.
#[expect(clippy::large_enum_variant, reason = "a box would be an allocation for each frame")]
pub enum Planned {
    /// A frame of these pages.
    Pages(PageBatch),
    /// The end of the round: all of its pages are planned.
    EndOfRound {
        /// The round.
        round: u32,
        /// Time for re-arming the dirty log in this round.
        rearm_time: Duration,
        /// The dirty log's name in this round.
        log: &'static str,
        /// Pages that were not sent because the guest had hinted that they are free.
        free_pages: u64,
    },
    /// Nothing yet: the remaining pages may still be hinted free. The round's [`Hinted`] raises the
    /// signal when they can be planned.
    Wait,
}

/// The pages of one frame.
pub struct PageBatch {
    round: u32,
    slot: SlotId,
    pages: [u64; MOST_FRAME_PAGES],
    count: usize,
    /// See [`RoundOrder::zero`].
    pub zero: Option<Arc<PageSet>>,
    /// Set if hinted pages must be sent with the poison that the guest expects in them.
    pub poisoned: Option<Arc<Hinted>>,
}

impl PageBatch {
    /// The pages of a run, at most [`MOST_FRAME_PAGES`] of them.
    #[must_use]
    pub fn of_run(round: u32, run: PageRun) -> Self {
        let count = run.pages.min(MOST_FRAME_PAGES as u64) as usize;
        let mut pages = [0; MOST_FRAME_PAGES];
        for (place, page) in pages[..count].iter_mut().zip(run.first..) {
            *place = page;
        }
        Self { round, slot: run.slot, pages, count, zero: None, poisoned: None }
    }

    /// The batch for the encoder.
    #[must_use]
    pub fn as_batch(&self) -> Batch<'_> {
        let pages = &self.pages[..self.count];
        Batch { round: self.round, slot: self.slot, pages }
    }

    /// The round.
    #[must_use]
    pub fn round(&self) -> u32 {
        self.round
    }
}

/// One lane's share of the guest's memory, batch by batch.
pub struct LanePlan {
    share: Share,
    round: Option<RoundProgress>,
    /// Runs of the present block, in reverse order.
    runs: Vec<(u64, u64)>,
    rearm_words: Vec<u64>,
}

impl LanePlan {
    /// A plan for lane `lane` of `lanes`.
    #[must_use]
    pub fn new(lane: u8, lanes: u8) -> Self {
        Self {
            share: Share { lane: lane.into(), lanes: usize::from(lanes).max(1) },
            round: None,
            runs: Vec::with_capacity(BLOCK_PAGES as usize / 2),
            rearm_words: Vec::with_capacity(REARM_WORDS),
        }
    }

    /// Begins a round. The previous one must have ended.
    pub fn begin(&mut self, order: RoundOrder) {
        self.runs.clear();
        self.round = Some(RoundProgress::new(order, self.share));
    }

    /// Whether a round is in progress.
    #[must_use]
    pub fn has_round(&self) -> bool {
        self.round.is_some()
    }

    /// The next frame of the round with `frame_pages` pages, at most [`MOST_FRAME_PAGES`], and
    /// finally its end. `None` without a round. If the guest runs, pages are write-protected again
    /// first, about `rearm_pages` at a time. Each such call makes every vCPU leave the guest, but
    /// writes between the call and the copy cause the page to be sent again.
    ///
    /// # Errors
    /// Errors of the dirty log.
    pub fn next(
        &mut self,
        frame_pages: usize,
        rearm_pages: u64,
    ) -> Result<Option<Planned>, MigrateError> {
        let frame_pages = frame_pages.clamp(1, MOST_FRAME_PAGES);
        let mut pages = [0; MOST_FRAME_PAGES];
        let mut count = 0;
        loop {
            while let Some((first, length)) = self.runs.pop() {
                let taken = length.min((frame_pages - count) as u64);
                for (place, page) in pages[count..].iter_mut().zip(first..first + taken) {
                    *place = page;
                }
                count += taken as usize;
                if taken < length {
                    self.runs.push((first + taken, length - taken));
                }
                if count == frame_pages {
                    return Ok(self.batch(pages, count));
                }
            }
            let must_wait = self.round.as_ref().is_some_and(RoundProgress::must_wait);
            if !must_wait && self.next_block(rearm_pages)? {
                continue;
            }
            if count > 0 {
                return Ok(self.batch(pages, count));
            }
            if must_wait {
                return Ok(Some(Planned::Wait));
            }
            if !self.round.as_mut().is_some_and(RoundProgress::next_slot) {
                return Ok(self.end());
            }
        }
    }

    /// Loads the runs of the slot's next block with pages. Returns whether there is one.
    fn next_block(&mut self, rearm_pages: u64) -> Result<bool, MigrateError> {
        let Some(round) = &mut self.round else { return Ok(false) };
        let next = round.next_block(rearm_pages, &mut self.rearm_words)?;
        let Some(BlockPages { base, words }) = next else { return Ok(false) };
        self.runs.extend(flat_runs(&words).map(|(first, pages)| (base + first, pages)));
        self.runs.reverse();
        Ok(true)
    }

    fn batch(&self, pages: [u64; MOST_FRAME_PAGES], count: usize) -> Option<Planned> {
        let RoundProgress { order, slot, .. } = self.round.as_ref()?;
        Some(Planned::Pages(PageBatch {
            round: order.round,
            slot: *slot,
            pages,
            count,
            zero: order.zero.clone(),
            poisoned: order.hinted.clone().filter(|hinted| hinted.poison().is_some()),
        }))
    }

    fn end(&mut self) -> Option<Planned> {
        let RoundProgress { order, rearm_time, free_pages, .. } = self.round.take()?;
        let (round, log) = (order.round, order.log.name());
        Some(Planned::EndOfRound { round, rearm_time, log, free_pages })
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;
    use proptest::prelude::*;
    use vmferry_dirty::DirtyLogError;
    use vmferry_memory::SlotLayout;

    use super::*;

    const PAGES: u64 = 5000;

    /// Records what is protected again, and checks that no page is read before.
    #[derive(Default)]
    struct Log(Mutex<Vec<(u16, u64)>>);

    impl DirtyLog for Log {
        fn name(&self) -> &'static str {
            "noting"
        }

        fn start(&self) -> Result<(), DirtyLogError> {
            Ok(())
        }

        fn collect(&self, _into: &mut PageSet) -> Result<(), DirtyLogError> {
            Ok(())
        }

        fn rearm(&self, slot: SlotId, first: usize, words: &[u64]) -> Result<(), DirtyLogError> {
            let runs = flat_runs(words).flat_map(|(page, count)| page..page + count);
            let pages = runs.map(|page| (slot.0, first as u64 * 64 + page));
            self.0.lock().extend(pages);
            Ok(())
        }

        fn stop(&self) -> Result<(), DirtyLogError> {
            Ok(())
        }
    }

    fn set(runs: &[(u16, u64, u64)]) -> PageSet {
        let slot =
            |slot| SlotLayout { slot: SlotId(slot), gpa: u64::from(slot) << 32, pages: PAGES };
        let mut set = PageSet::for_layout(&[slot(0), slot(1)]);
        for (slot, first, count) in runs {
            set.bitmap_mut(SlotId(*slot)).set_run(*first, (*count).min(PAGES - first));
        }
        set
    }

    proptest! {
        #[test]
        fn page_is_sent_once_on_its_lane_after_it_is_protected(
            runs in prop::collection::vec((0_u16..2, 0..PAGES, 1_u64..900), 0..8),
            deferred in prop::collection::vec((0_u16..2, 0..PAGES, 1_u64..900), 0..8),
            lanes in 1_u8..5, frame_pages in 1_usize..70, rearm_pages in 1_u64..3000,
        ) {
            let (pages, deferred) = (Arc::new(set(&runs)), Arc::new(set(&deferred)));
            let mut sent = set(&[]);
            for lane in 0..lanes {
                let log = Arc::new(Log::default());
                let noted = Arc::clone(&log);
                let mut plan = LanePlan::new(lane, lanes);
                plan.begin(RoundOrder {
                    round: 7,
                    log,
                    rearm_first: true,
                    pages: Arc::clone(&pages),
                    deferred: Some(Arc::clone(&deferred)),
                    zero: None,
                    hinted: None,
                });
                let mut sends_deferred = false;
                loop {
                    match plan.next(frame_pages, rearm_pages).unwrap().unwrap() {
                        Planned::Pages(batch) => {
                            let batch = batch.as_batch();
                            prop_assert_eq!(batch.round, 7);
                            prop_assert!((1..=frame_pages).contains(&batch.pages.len()));
                            prop_assert!(batch.pages.is_sorted());
                            for page in batch.pages {
                                prop_assert_eq!(page / 512 % u64::from(lanes), u64::from(lane));
                                prop_assert!(!sent.bitmap(batch.slot).is_set(*page), "once");
                                sent.bitmap_mut(batch.slot).set(*page);
                                prop_assert!(noted.0.lock().contains(&(batch.slot.0, *page)));
                                let is_deferred = deferred.bitmap(batch.slot).is_set(*page);
                                prop_assert!(is_deferred || !sends_deferred, "others are first");
                                sends_deferred |= is_deferred;
                            }
                        }
                        Planned::EndOfRound { round, log, free_pages, .. } => {
                            prop_assert_eq!((round, log, free_pages), (7, "noting", 0));
                            break;
                        }
                        Planned::Wait => unreachable!("there are no hints"),
                    }
                }
                prop_assert!(!plan.has_round());
                prop_assert!(plan.next(frame_pages, rearm_pages).unwrap().is_none());
            }
            prop_assert_eq!(sent, Arc::unwrap_or_clone(pages));
        }
    }

    /// The lane's pages until it has to wait or has finished.
    fn sent(plan: &mut LanePlan) -> (Vec<u64>, Option<Planned>) {
        let mut pages = Vec::new();
        loop {
            match plan.next(64, 1000).unwrap() {
                Some(Planned::Pages(batch)) => pages.extend_from_slice(batch.as_batch().pages),
                other => return (pages, other),
            }
        }
    }

    #[test]
    fn deferred_pages_wait_for_hints_and_hinted_pages_are_left_out() {
        let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: PAGES }];
        let of = |first, count| {
            let mut pages = PageSet::for_layout(&layout);
            pages.bitmap_mut(SlotId(0)).set_run(first, count);
            Arc::new(pages)
        };
        let hinted = Arc::new(Hinted::new(&layout, Arc::default()));
        let mut plan = LanePlan::new(0, 1);
        let id = hinted.open(of(0, 900));
        hinted.hold();
        plan.begin(RoundOrder {
            round: 1,
            log: Arc::new(()),
            rearm_first: false,
            pages: of(0, 900),
            deferred: Some(of(100, 800)),
            zero: None,
            hinted: Some(Arc::clone(&hinted)),
        });
        let (pages, then) = sent(&mut plan);
        assert_eq!(pages, (0..100).collect::<Vec<_>>(), "these can't be free");
        assert!(matches!(then, Some(Planned::Wait)));
        assert!(matches!(sent(&mut plan), (none, Some(Planned::Wait)) if none.is_empty()));
        hinted.free(id, 50 << 12, 450 << 12, None);
        hinted.complete(id);
        let (pages, then) = sent(&mut plan);
        assert_eq!(pages, (500..900).collect::<Vec<_>>());
        // The pages before the hint were sent. A hint for pages outside the round has no effect.
        assert!(matches!(then, Some(Planned::EndOfRound { free_pages: 400, .. })));
    }
}
