//! One lane of the source, and a page's way through it.
//!
//! ```text
//!  next_batch   the plan names the next pages and write-protects them; a buffer is reserved
//!  encode       the pages are read once, into the buffer, and a frame is made of the copy
//!  enqueue      the frame waits for the lane's channel
//!  SenderThread numbers the frame, sends it, and keeps it in the window
//!  acknowledge  the destination has placed the frame: its buffer is free for the next pages
//! ```
//! The first three steps are taken by whichever [worker](super::workers) is free. No thread
//! distributes batches, so a busy compressor can't stall a distributor. While nothing is
//! compressed the lane's sender takes these steps itself.
//!
//! Frames of a round are finished in any order. The frame that ends the round comes last.

pub mod plan;
mod queue;
mod sender;
mod signal;
mod window;

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vmferry_codec::{EncodedFrame, FrameCounts, Method};

use super::chooser::{Chooser, Decision};
use super::page_encoder::PageEncoder;
use crate::error::MigrateError;
use crate::rounds::tracker::LaneTotals;
use plan::{LanePlan, PageBatch, Planned, RoundOrder};
use queue::FrameQueue;
pub use sender::{LaneSender, SenderContext};
pub use signal::Signal;
use window::Window;

/// Frames that a lane has ready besides those in progress: one is being sent while the next waits.
const FRAMES_AHEAD: usize = 2;

/// A lane as all threads share it: workers or streams, its sender, and the reader of
/// acknowledgements.
pub struct SourceLane {
    number: u8,
    chooser: Arc<Chooser>,
    /// Raised for threads that encode.
    signal: Arc<Signal>,
    /// Not used by a carried guest, whose streams fill the queue.
    plan: Mutex<LanePlan>,
    /// The buffers of the lane's frames.
    window: Window<EncodedFrame>,
    /// Frames that wait for the channel.
    queue: FrameQueue<QueuedFrame>,
    /// The frames sent in the present round.
    totals: Mutex<LaneTotals>,
}

/// The sizes of a lane.
pub struct LaneSizes {
    /// The number of lanes of the migration.
    pub lanes: u8,
    /// The number of threads that encode.
    pub workers: usize,
    /// The number of frames that may be outstanding.
    pub window: usize,
}

/// A frame ready to be sent.
pub struct QueuedFrame {
    /// The frame.
    pub frame: EncodedFrame,
    /// What the statistics count of it.
    pub summary: FrameSummary,
}

/// What the statistics count of a frame.
#[derive(Clone, Copy)]
pub enum FrameSummary {
    /// Pages.
    Pages {
        /// The pages by encoding.
        counts: FrameCounts,
        /// Why they are encoded in this way.
        decision: Decision,
    },
    /// The end of a round.
    EndOfRound {
        /// Time for re-arming the dirty log in this round.
        rearm_time: Duration,
        /// The dirty log's name in this round.
        log: &'static str,
        /// Pages that were not sent because the guest had hinted that they are free.
        free_pages: u64,
    },
}

impl SourceLane {
    /// An idle lane, number `number`.
    #[must_use]
    pub fn new(number: u8, sizes: &LaneSizes, chooser: Arc<Chooser>, signal: Arc<Signal>) -> Self {
        Self {
            number,
            plan: Mutex::new(LanePlan::new(number, sizes.lanes)),
            window: Window::new(sizes.window, Arc::clone(&signal)),
            queue: FrameQueue::new(sizes.workers + FRAMES_AHEAD, Arc::clone(&signal)),
            totals: Mutex::default(),
            chooser,
            signal,
        }
    }

    /// The lane's number.
    #[must_use]
    pub fn number(&self) -> u8 {
        self.number
    }

    /// Plans a round. The previous one must have ended.
    pub fn begin_round(&self, order: RoundOrder) {
        self.plan.lock().begin(order);
    }

    /// The next batch of pages and a buffer for its frame. `None` if there is nothing to encode
    /// now, no buffer is free, or the queue is full.
    ///
    /// The plan is locked only while the page numbers are found.
    ///
    /// # Errors
    /// Errors of the dirty log.
    pub fn next_batch(&self) -> Result<Option<(PageBatch, EncodedFrame)>, MigrateError> {
        let mut plan = self.plan.lock();
        if !plan.has_round() {
            return Ok(None);
        }
        let Some(mut buffer) = self.reserve() else { return Ok(None) };
        let begun = Instant::now();
        let planned = plan.next(self.chooser.frame_pages(), self.chooser.rearm_pages());
        self.chooser.planned(begun.elapsed());
        match planned? {
            Some(Planned::Pages(batch)) => return Ok(Some((batch, buffer))),
            Some(Planned::EndOfRound { round, rearm_time, log, free_pages }) => {
                buffer.end_of_round(round);
                let summary = FrameSummary::EndOfRound { rearm_time, log, free_pages };
                self.queue.put_last(QueuedFrame { frame: buffer, summary });
            }
            Some(Planned::Wait) | None => self.give_back(buffer),
        }
        Ok(None)
    }

    /// A buffer and room in the queue for its frame. The buffer must be [enqueued](Self::enqueue)
    /// or [given back](Self::give_back).
    #[must_use]
    pub fn reserve(&self) -> Option<EncodedFrame> {
        if !self.queue.try_begin() {
            return None;
        }
        let buffer = self.window.try_acquire(EncodedFrame::new);
        if buffer.is_none() {
            self.queue.give_up();
        }
        buffer
    }

    /// Returns a reserved buffer that was not needed.
    pub fn give_back(&self, buffer: EncodedFrame) {
        self.queue.give_up();
        self.window.give_back(buffer);
    }

    /// Makes the frame of a batch.
    ///
    /// # Errors
    /// Errors of the memory or of the compressor.
    pub fn encode(
        &self,
        encoder: &mut PageEncoder,
        batch: &PageBatch,
        mut buffer: EncodedFrame,
        mut decision: Decision,
    ) -> Result<QueuedFrame, MigrateError> {
        if decision.turned {
            self.signal.raise();
        }
        if batch.poisoned.as_ref().is_some_and(|hinted| hinted.poison() != Some(0)) {
            // Such pages repeat a single word. LZ4 is the fastest method for them, and they shrink
            // to almost nothing.
            decision.choice.pack = self.chooser.decodable(Method::lz4());
        }
        let begun = Instant::now();
        let counts = encoder.encode(self.number, batch, &mut buffer, decision.choice)?;
        self.chooser.encoded(decision, counts, begun.elapsed());
        Ok(QueuedFrame { frame: buffer, summary: FrameSummary::Pages { counts, decision } })
    }

    /// Queues a frame for the lane's [sender](LaneSender).
    pub fn enqueue(&self, frame: QueuedFrame) {
        self.queue.put(frame);
    }

    /// Frees the buffer of every frame up to number `sequence`, which the destination has placed.
    /// Returns whether no frame is outstanding.
    pub fn acknowledge(&self, sequence: u64) -> bool {
        self.window.acknowledge(sequence)
    }

    /// Whether the channel is idle and waits for a frame.
    #[must_use]
    pub fn is_channel_idle(&self) -> bool {
        self.queue.is_channel_idle()
    }

    /// Changes the number of frames that may be outstanding. Frames already beyond it stay.
    pub fn set_window(&self, frames: usize) {
        self.window.set_limit(frames);
    }

    /// What the lane has sent since the last call or the end of the last round.
    #[must_use]
    pub fn take_totals(&self) -> LaneTotals {
        std::mem::take(&mut self.totals.lock())
    }

    /// Closes the queue. The frame being sent is the last one.
    pub fn close(&self) {
        self.queue.close();
    }
}

#[cfg(test)]
impl SourceLane {
    /// The next frame of the queue, for which it waits.
    pub fn await_frame(&self) -> QueuedFrame {
        loop {
            match self.queue.take() {
                queue::Next::Frame(frame) => return frame,
                queue::Next::Empty => self.queue.wait(),
                _ => panic!("the lane is closed"),
            }
        }
    }
}
