//! The plan of a lane: which pages it sends in a round, in which order and in which frames.
//!
//! A lane owns the pages whose number maps to it ([`crate::config::lane_of`]) for the whole
//! migration, so no two versions of a page can overtake each other. Whichever worker is free asks
//! the plan for the next batch of pages. Planning costs almost nothing, and no batch waits to be
//! passed on.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmferry_codec::Batch;
use vmferry_dirty::DirtyLog;
use vmferry_memory::traverse::{BLOCK_PAGES, BLOCK_WORDS, flat_runs};
use vmferry_memory::{PageBitmap, PageSet, SlotId};

use crate::config::LANE_STRIPE_PAGES;
use crate::config::compression::MOST_FRAME_PAGES;
use crate::error::MigrateError;
use crate::rounds::hinted::Hinted;

// A lane's stripes are the bitmap's blocks.
const _: () = assert!(LANE_STRIPE_PAGES == BLOCK_PAGES);

/// The work of a round.
#[derive(Clone)]
pub struct Job {
    /// The round's number, from 1.
    pub round: u32,
    /// Whether the guest runs, so that each page must be write-protected again before it is read.
    pub rearm: bool,
    /// All pages of the round. The lane selects its own.
    pub pages: Arc<PageSet>,
    /// The pages of these to send last, because they were in the previous round too. Writes until
    /// then cost no additional transfer.
    pub last: Option<Arc<PageSet>>,
    /// Pages of these that the guest has freed. They read as zero, and reading them would populate
    /// them again.
    pub zero: Option<Arc<PageSet>>,
    /// Pages that the guest hints free during the round. All pages are write-protected then, and
    /// `rearm` is not set.
    pub hinted: Option<Arc<Hinted>>,
}

/// A worker's next task for a lane.
#[expect(clippy::large_enum_variant, reason = "a box would be an allocation for each frame")]
pub enum Task {
    /// Read, encode and send these pages.
    Pages(PageBatch),
    /// Report that the lane has sent all of the round.
    EndOfRound {
        /// The round.
        round: u32,
        /// Time for re-arming the dirty log in this round.
        rearm: Duration,
        /// The dirty log's name in this round.
        log: &'static str,
        /// Pages that were not sent because the guest had hinted that they are free.
        free: u64,
    },
    /// Ask again later: the remaining pages may yet be hinted free. The round's [`Hinted`] raises
    /// the signal then.
    Wait,
}

/// The pages of one frame.
pub struct PageBatch {
    round: u32,
    slot: SlotId,
    pages: [u64; MOST_FRAME_PAGES],
    count: usize,
    /// See [`Job::zero`].
    pub zero: Option<Arc<PageSet>>,
    /// Set if hinted pages must be sent with the poison that the guest expects in them.
    pub poisoned: Option<Arc<Hinted>>,
}

impl PageBatch {
    /// The batch for the encoder.
    #[must_use]
    pub fn as_batch(&self) -> Batch<'_> {
        let pages = &self.pages[..self.count];
        Batch { round: self.round, slot: self.slot, pages }
    }
}

/// One lane's share of the guest's memory, batch by batch.
pub struct LanePlan {
    lane: usize,
    lanes: usize,
    log: Arc<dyn DirtyLog>,
    work: Option<Work>,
    /// Runs of the present block, in reverse order.
    runs: Vec<(u64, u64)>,
    rearm_words: Vec<u64>,
}

/// The progress of a round.
struct Work {
    job: Job,
    /// Whether the pages to be sent last are being sent.
    last: bool,
    slot: SlotId,
    /// Blocks of the slot below this are done.
    block: usize,
    /// Blocks of the slot below this are write-protected again.
    rearmed_to: usize,
    rearm: Duration,
    /// Pages hinted free.
    free: u64,
}

/// The most words of the bitmap that one call re-arms: 128 MiB of the guest.
const REARM_WORDS: usize = 512;

impl LanePlan {
    /// A plan for lane `lane` of `lanes`.
    #[must_use]
    pub fn new(lane: u8, lanes: u8, log: Arc<dyn DirtyLog>) -> Self {
        Self {
            lane: lane.into(),
            lanes: usize::from(lanes).max(1),
            log,
            work: None,
            runs: Vec::with_capacity(BLOCK_PAGES as usize / 2),
            rearm_words: Vec::with_capacity(REARM_WORDS),
        }
    }

    /// Begins a round. The previous one must have ended.
    pub fn begin(&mut self, job: Job) {
        self.runs.clear();
        let (last, slot) = (false, SlotId(0));
        let (rearm, free) = (Duration::ZERO, 0);
        self.work = Some(Work { job, last, slot, block: 0, rearmed_to: 0, rearm, free });
    }

    /// Whether a round is in progress.
    #[must_use]
    pub fn has_work(&self) -> bool {
        self.work.is_some()
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
    ) -> Result<Option<Task>, MigrateError> {
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
                    return Ok(self.pages(pages, count));
                }
            }
            let is_held = self.work.as_ref().is_some_and(Work::is_held);
            if !is_held && self.next_block(rearm_pages)? {
                continue;
            }
            if count > 0 {
                return Ok(self.pages(pages, count));
            }
            if is_held {
                return Ok(Some(Task::Wait));
            }
            if !self.next_slot() {
                return Ok(self.end());
            }
        }
    }

    fn pages(&mut self, pages: [u64; MOST_FRAME_PAGES], count: usize) -> Option<Task> {
        let work = self.work.as_ref()?;
        Some(Task::Pages(PageBatch {
            round: work.job.round,
            slot: work.slot,
            pages,
            count,
            zero: work.job.zero.clone(),
            poisoned: work.job.hinted.clone().filter(|hinted| hinted.poison().is_some()),
        }))
    }

    fn end(&mut self) -> Option<Task> {
        let work = self.work.take()?;
        let (round, log) = (work.job.round, self.log.name());
        Some(Task::EndOfRound { round, rearm: work.rearm, log, free: work.free })
    }

    /// Loads the runs of the slot's next non-empty block. Returns whether there is one.
    fn next_block(&mut self, rearm_pages: u64) -> Result<bool, MigrateError> {
        let Some(work) = &mut self.work else { return Ok(false) };
        let share = Share { lane: self.lane, lanes: self.lanes };
        while let Some(block) = work.next(share) {
            work.block = block + 1;
            let mut words = work.words(block);
            if let Some(hinted) = &work.job.hinted {
                work.free += hinted.take_out(work.slot, block, &mut words);
            }
            if words == [0; BLOCK_WORDS] {
                continue;
            }
            if work.job.rearm && block >= work.rearmed_to {
                rearm(work, share, block, rearm_pages, &mut self.rearm_words, &*self.log)?;
            }
            let base = block as u64 * BLOCK_PAGES;
            self.runs.extend(flat_runs(&words).map(|(first, pages)| (base + first, pages)));
            self.runs.reverse();
            return Ok(true);
        }
        Ok(false)
    }

    /// Moves to the next slot, or to the pages to be sent last. Returns whether there is any.
    fn next_slot(&mut self) -> bool {
        let Some(work) = &mut self.work else { return false };
        (work.block, work.rearmed_to) = (0, 0);
        let slots = work.job.pages.iter().count();
        if usize::from(work.slot.0) + 1 < slots {
            work.slot.0 += 1;
        } else if !work.last && work.job.last.is_some() {
            work.last = true;
            work.slot = SlotId(0);
        } else {
            return false;
        }
        true
    }
}

/// Selects the blocks of a lane.
#[derive(Clone, Copy)]
struct Share {
    lane: usize,
    lanes: usize,
}

impl Work {
    /// Whether the next pages may yet be hinted free and have to wait.
    fn is_held(&self) -> bool {
        self.last && self.job.hinted.as_ref().is_some_and(|hinted| hinted.is_held())
    }

    fn bitmap(&self) -> Option<&PageBitmap> {
        self.job.pages.iter().nth(self.slot.0.into()).map(|(_, bitmap)| bitmap)
    }

    /// The slot's next block of this lane that may have pages, starting with the present one.
    fn next(&self, share: Share) -> Option<usize> {
        let bitmap = self.bitmap()?;
        let mut block = bitmap.next_block(self.block)?;
        while block % share.lanes != share.lane {
            block = bitmap.next_block(block + 1)?;
        }
        Some(block)
    }

    /// The pages of a block to send now.
    fn words(&self, block: usize) -> [u64; BLOCK_WORDS] {
        let mut words = self.bitmap().map_or([0; BLOCK_WORDS], |bitmap| *bitmap.block(block));
        if let Some(last) = &self.job.last {
            let flip = if self.last { 0 } else { u64::MAX };
            for (word, last) in words.iter_mut().zip(last.bitmap(self.slot).block(block)) {
                *word &= last ^ flip;
            }
        }
        words
    }
}

/// Write-protects this lane's pages again, starting with a block.
fn rearm(
    work: &mut Work,
    share: Share,
    first: usize,
    pages: u64,
    words: &mut Vec<u64>,
    log: &dyn DirtyLog,
) -> Result<(), MigrateError> {
    words.clear();
    let (mut block, mut found) = (first, 0);
    let slot_words = work.bitmap().map_or(0, |bitmap| bitmap.words().len());
    let most = slot_words.min(first * BLOCK_WORDS + REARM_WORDS);
    while block * BLOCK_WORDS < most && found < pages {
        // Pages of other lanes are protected by those lanes.
        let mine =
            if block % share.lanes == share.lane { work.words(block) } else { [0; BLOCK_WORDS] };
        found += mine.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
        words.extend_from_slice(&mine);
        block += 1;
    }
    words.truncate(slot_words - first * BLOCK_WORDS);
    let begun = Instant::now();
    log.rearm(work.slot, first * BLOCK_WORDS, words)?;
    work.rearm += begun.elapsed();
    work.rearmed_to = block;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

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
            self.0.lock().unwrap().extend(pages);
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
        fn every_page_is_sent_once_on_its_lane_and_protected_before(
            runs in prop::collection::vec((0_u16..2, 0..PAGES, 1_u64..900), 0..8),
            last in prop::collection::vec((0_u16..2, 0..PAGES, 1_u64..900), 0..8),
            lanes in 1_u8..5, frame_pages in 1_usize..70, rearm_pages in 1_u64..3000,
        ) {
            let (pages, last) = (Arc::new(set(&runs)), Arc::new(set(&last)));
            let mut sent = set(&[]);
            for lane in 0..lanes {
                let log = Arc::new(Log::default());
                let noted = Arc::clone(&log);
                let mut plan = LanePlan::new(lane, lanes, log);
                plan.begin(Job {
                    round: 7,
                    rearm: true,
                    pages: Arc::clone(&pages),
                    last: Some(Arc::clone(&last)),
                    zero: None,
                    hinted: None,
                });
                let mut goes_last = false;
                loop {
                    match plan.next(frame_pages, rearm_pages).unwrap().unwrap() {
                        Task::Pages(batch) => {
                            let batch = batch.as_batch();
                            prop_assert_eq!(batch.round, 7);
                            prop_assert!((1..=frame_pages).contains(&batch.pages.len()));
                            prop_assert!(batch.pages.is_sorted());
                            for page in batch.pages {
                                prop_assert_eq!(page / 512 % u64::from(lanes), u64::from(lane));
                                prop_assert!(!sent.bitmap(batch.slot).is_set(*page), "once");
                                sent.bitmap_mut(batch.slot).set(*page);
                                prop_assert!(noted.0.lock().unwrap().contains(&(batch.slot.0, *page)));
                                let is_last = last.bitmap(batch.slot).is_set(*page);
                                prop_assert!(is_last || !goes_last, "pages that go last do");
                                goes_last |= is_last;
                            }
                        }
                        Task::EndOfRound { round, log, free, .. } => {
                            prop_assert_eq!((round, log, free), (7, "noting", 0));
                            break;
                        }
                        Task::Wait => unreachable!("there are no hints"),
                    }
                }
                prop_assert!(!plan.has_work());
                prop_assert!(plan.next(frame_pages, rearm_pages).unwrap().is_none());
            }
            prop_assert_eq!(sent, Arc::unwrap_or_clone(pages));
        }
    }

    /// The lane's pages until it has to wait or has finished.
    fn sent(plan: &mut LanePlan) -> (Vec<u64>, Option<Task>) {
        let mut pages = Vec::new();
        loop {
            match plan.next(64, 1000).unwrap() {
                Some(Task::Pages(batch)) => pages.extend_from_slice(batch.as_batch().pages),
                other => return (pages, other),
            }
        }
    }

    #[test]
    fn what_may_be_hinted_is_waited_for_and_what_is_hinted_is_left_out() {
        let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: PAGES }];
        let of = |first, count| {
            let mut pages = PageSet::for_layout(&layout);
            pages.bitmap_mut(SlotId(0)).set_run(first, count);
            Arc::new(pages)
        };
        let hinted = Arc::new(Hinted::new(&layout, Arc::default()));
        let mut plan = LanePlan::new(0, 1, Arc::new(()));
        let id = hinted.open(of(0, 900));
        hinted.hold();
        plan.begin(Job {
            round: 1,
            rearm: false,
            pages: of(0, 900),
            last: Some(of(100, 800)),
            zero: None,
            hinted: Some(Arc::clone(&hinted)),
        });
        let (pages, then) = sent(&mut plan);
        assert_eq!(pages, (0..100).collect::<Vec<_>>(), "these can't be free");
        assert!(matches!(then, Some(Task::Wait)));
        assert!(matches!(sent(&mut plan), (none, Some(Task::Wait)) if none.is_empty()));
        hinted.free(id, 50 << 12, 450 << 12, None);
        hinted.complete(id);
        let (pages, then) = sent(&mut plan);
        assert_eq!(pages, (500..900).collect::<Vec<_>>());
        // The pages before the hint were sent. A hint for pages outside the round has no effect.
        assert!(matches!(then, Some(Task::EndOfRound { free: 400, .. })));
    }
}
