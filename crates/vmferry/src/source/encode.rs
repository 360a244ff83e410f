//! What one lane of the source does with a round: finds its pages, reads each once, and makes frames.
//!
//! A lane owns the pages whose number maps to it ([`crate::config::lane_of`]) for the whole
//! migration, so no two versions of a page can overtake each other. Within the lane the frames are
//! numbered without gaps.

use std::sync::Arc;
use std::time::Instant;

use vmferry_codec::{EncodedFrame, Encoder, PageHashes};
use vmferry_dirty::DirtyLog;
use vmferry_memory::traverse::{BLOCK_PAGES, BLOCK_WORDS};
use vmferry_memory::{GuestMemory, PAGE_SIZE, PageBitmap, PageRun, PageSet, SlotId};

use super::rounds::LaneTotals;
use crate::config::{FRAME_PAGES, LANE_STRIPE_PAGES};
use crate::error::MigrateError;

// A lane's stripes are the bitmap's.
const _: () = assert!(LANE_STRIPE_PAGES == BLOCK_PAGES);

/// Where a lane's frames come from and go to.
pub trait FrameSink {
    /// An empty frame; `None` when the lane is to end.
    fn acquire(&mut self) -> Option<EncodedFrame>;

    /// Takes a frame to the channel. `end` is what the round was, with its last frame. `false` when
    /// the lane is to end.
    fn send(&mut self, sequence: u64, frame: EncodedFrame, end: Option<LaneTotals>) -> bool;
}

/// A round's work.
pub struct Job {
    /// The round's number, from 1.
    pub round: u32,
    /// Whether the guest runs, so that each page is protected again before it is read.
    pub rearm: bool,
    /// All pages of the round; the lane takes its own.
    pub pages: Arc<PageSet>,
    /// Pages of these that the guest has given back: they are zero, and reading them would populate
    /// them again.
    pub given_back: Option<Arc<PageSet>>,
}

/// Why a lane has not sent its round.
#[derive(Debug)]
pub enum LaneFailure {
    /// The sink wanted no more: whoever ended it has reported why.
    Stopped,
    /// The memory or the log failed.
    Error(MigrateError),
}

impl<E: Into<MigrateError>> From<E> for LaneFailure {
    fn from(error: E) -> Self {
        Self::Error(error.into())
    }
}

/// One lane's share of the guest's memory, as frames.
pub struct LaneEncoder {
    lane: u8,
    lanes: u8,
    memory: GuestMemory,
    log: Arc<dyn DirtyLog>,
    hashes: Arc<PageHashes>,
    encoder: Encoder,
    rearm_words: Vec<u64>,
    /// Pages of the present slot below this are protected again for this round.
    rearmed_to: u64,
    sequence: u64,
    totals: LaneTotals,
}

impl LaneEncoder {
    /// Lane `lane` of `lanes`. `hashes` are those of the pages as last sent, over all lanes.
    #[must_use]
    pub fn new(
        lane: u8,
        lanes: u8,
        memory: GuestMemory,
        log: Arc<dyn DirtyLog>,
        hashes: Arc<PageHashes>,
    ) -> Self {
        Self {
            lane,
            lanes,
            memory,
            log,
            hashes,
            encoder: Encoder::new(),
            rearm_words: Vec::new(),
            rearmed_to: 0,
            sequence: 0,
            totals: LaneTotals::default(),
        }
    }

    /// Sends the lane's share of a round, and the frame that ends it.
    ///
    /// # Errors
    /// [`LaneFailure::Stopped`] if the sink ends, and what the memory or the log says.
    pub fn send_round(&mut self, job: Job, sink: &mut impl FrameSink) -> Result<(), LaneFailure> {
        let round = job.round;
        self.totals = LaneTotals { log: self.log.name(), ..LaneTotals::default() };
        for (slot, bitmap) in job.pages.iter() {
            self.send_slot(&job, slot, bitmap, sink)?;
        }
        // The conductor reuses the set once every lane has reported.
        drop(job);
        let mut frame = sink.acquire().ok_or(LaneFailure::Stopped)?;
        self.sequence += 1;
        self.encoder.end_of_round(&mut frame, round, self.sequence);
        self.totals.bytes += frame.wire_bytes() as u64;
        let sent = sink.send(self.sequence, frame, Some(self.totals));
        sent.then_some(()).ok_or(LaneFailure::Stopped)
    }

    /// Visits this lane's stripes only, run by run.
    fn send_slot(
        &mut self,
        job: &Job,
        slot: SlotId,
        bitmap: &PageBitmap,
        sink: &mut impl FrameSink,
    ) -> Result<(), LaneFailure> {
        let mut batch = [0_u64; FRAME_PAGES];
        let mut filled = 0;
        self.rearmed_to = 0;
        for (first, pages) in bitmap.runs_of_stripes(self.lane.into(), self.lanes.into()) {
            let end = first + pages;
            if job.rearm && end > self.rearmed_to {
                self.rearm(slot, bitmap, first)?;
            }
            let mut page = first;
            while page < end {
                let fitting = (FRAME_PAGES - filled).min((end - page) as usize);
                for (place, page) in batch[filled..][..fitting].iter_mut().zip(page..) {
                    *place = page;
                }
                filled += fitting;
                page += fitting as u64;
                if filled == FRAME_PAGES {
                    self.send_batch(job, slot, &batch[..filled], sink)?;
                    filled = 0;
                }
            }
        }
        if filled > 0 {
            self.send_batch(job, slot, &batch[..filled], sink)?;
        }
        Ok(())
    }

    fn send_batch(
        &mut self,
        job: &Job,
        slot: SlotId,
        pages: &[u64],
        sink: &mut impl FrameSink,
    ) -> Result<(), LaneFailure> {
        let mut frame = sink.acquire().ok_or(LaneFailure::Stopped)?;
        // The one look at live memory: everything after works on the copy.
        let copy = frame.pages_mut(pages.len());
        let mut at = 0;
        for run in runs(slot, pages) {
            let bytes = run.pages as usize * PAGE_SIZE;
            self.copy_run(run, job.given_back.as_deref(), &mut copy[at..at + bytes])?;
            at += bytes;
        }
        self.sequence += 1;
        let counts =
            self.encoder.encode(&mut frame, job.round, self.sequence, slot, pages, &self.hashes);
        self.totals.content_pages += counts.content_pages;
        self.totals.zero_pages += counts.zero_pages;
        self.totals.bytes += frame.wire_bytes() as u64;
        let sent = sink.send(self.sequence, frame, None);
        sent.then_some(()).ok_or(LaneFailure::Stopped)
    }

    fn copy_run(
        &self,
        run: PageRun,
        given_back: Option<&PageSet>,
        copy: &mut [u8],
    ) -> Result<(), LaneFailure> {
        let Some(given_back) = given_back.map(|set| set.bitmap(run.slot)) else {
            return Ok(self.memory.copy_out(run, copy)?);
        };
        for (page, copy) in (run.first..).zip(copy.chunks_exact_mut(PAGE_SIZE)) {
            if given_back.is_set(page) {
                copy.fill(0);
            } else {
                self.memory.copy_out(PageRun { first: page, pages: 1, ..run }, copy)?;
            }
        }
        Ok(())
    }

    /// Protects this lane's pages again from page `first` on, as far as one call reaches. A call makes
    /// every vCPU leave the guest, so it is worth more pages than fit into a frame; and a page that is
    /// written between this and its copy is sent again, the more of them the slower the link, so it is
    /// not worth all of them.
    fn rearm(&mut self, slot: SlotId, bitmap: &PageBitmap, first: u64) -> Result<(), LaneFailure> {
        const STRIPE_WORDS: usize = BLOCK_WORDS;
        let words = bitmap.words();
        let stripe = (first / LANE_STRIPE_PAGES) as usize;
        let (from, to) =
            (stripe * STRIPE_WORDS, words.len().min(stripe * STRIPE_WORDS + REARM_WORDS));
        self.rearm_words.clear();
        self.rearm_words.extend_from_slice(&words[from..to]);
        // The other lanes' pages are theirs to protect.
        let (lane, lanes) = (usize::from(self.lane), usize::from(self.lanes));
        for (index, stripe_words) in self.rearm_words.chunks_mut(STRIPE_WORDS).enumerate() {
            if (stripe + index) % lanes != lane {
                stripe_words.fill(0);
            }
        }
        let begun = Instant::now();
        self.log.rearm(slot, from, &self.rearm_words)?;
        self.totals.rearm += begun.elapsed();
        self.rearmed_to = to as u64 * 64;
        Ok(())
    }
}

/// Words of the bitmap that one call re-arms at most: 128 MiB of the guest.
const REARM_WORDS: usize = 512;

/// Neighbouring page numbers as runs.
fn runs(slot: SlotId, pages: &[u64]) -> impl Iterator<Item = PageRun> + '_ {
    pages.chunk_by(|a, b| a + 1 == *b).map(move |run| PageRun {
        slot,
        first: run[0],
        pages: run.len() as u64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_make_runs() {
        let slot = SlotId(1);
        let found: Vec<_> =
            runs(slot, &[3, 4, 5, 9, 11, 12]).map(|run| (run.first, run.pages)).collect();
        assert_eq!(found, [(3, 3), (9, 1), (11, 2)]);
    }
}
