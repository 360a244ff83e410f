//! One lane of the source: a thread that reads and encodes, and a thread that sends.
//!
//! A lane owns the pages whose number maps to it ([`crate::lane_of`]) for the whole migration, so
//! no two versions of a page can overtake each other. Within the lane the frames are numbered
//! without gaps.

use std::io::Write;
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender};
use vmferry_codec::{Encoder, PageHashes};
use vmferry_dirty::DirtyLog;
use vmferry_memory::{GuestMemory, PAGE_SIZE, PageBitmap, PageRun, PageSet, SlotId};
use vmferry_transport::{ChannelWriter, RateLimiter};

use super::io::Input;
use super::rounds::LaneTotals;
use super::window::Window;
use crate::config::{FRAME_PAGES, LANE_STRIPE_PAGES};
use crate::cpu::CpuMeter;
use crate::error::MigrateError;
use crate::link::lost;

/// A frame with its buffers: the head (header and run table) and the pages as copied out.
pub type FrameBuffer = vmferry_codec::EncodedFrame;

/// What all lanes share.
#[derive(Clone)]
pub struct LaneContext {
    /// The guest's memory.
    pub memory: GuestMemory,
    /// The log, for re-arming just before a page is read.
    pub log: Arc<dyn DirtyLog>,
    /// Hashes of the pages as last sent.
    pub hashes: Arc<PageHashes>,
    /// The cap over all lanes.
    pub limiter: RateLimiter,
    /// Where results go.
    pub results: Sender<Input>,
    /// CPU time of the threads.
    pub cpu: CpuMeter,
    /// Number of lanes.
    pub lanes: u8,
    /// Bytes handed to the channels so far, for progress displays.
    pub sent_bytes: Arc<std::sync::atomic::AtomicU64>,
}

/// A round's work.
struct Job {
    round: u32,
    rearm: bool,
    pages: Arc<PageSet>,
}

/// What the encoder hands to the sender.
enum Outgoing {
    Frame { sequence: u64, frame: FrameBuffer },
    EndOfRound { sequence: u64, frame: FrameBuffer, totals: LaneTotals },
}

/// A lane at work.
pub struct Lane {
    jobs: Sender<Job>,
    window: Arc<Window<FrameBuffer>>,
    threads: Vec<JoinHandle<()>>,
}

impl Lane {
    /// Starts the lane's threads on its greeted channel.
    ///
    /// # Errors
    /// If the system has no thread left.
    pub fn start(
        lane: u8,
        context: &LaneContext,
        window: Arc<Window<FrameBuffer>>,
        writer: ChannelWriter,
    ) -> std::io::Result<Self> {
        let (jobs, jobs_in) = crossbeam_channel::bounded(1);
        // One frame being sent while the next is encoded; the window bounds the rest.
        let (frames, frames_in) = crossbeam_channel::bounded(2);
        let mut threads = Vec::with_capacity(2);
        let encoder = EncoderThread {
            lane,
            context: context.clone(),
            window: Arc::clone(&window),
            frames,
            encoder: Encoder::new(),
            rearm_words: Vec::new(),
            sequence: 0,
            totals: LaneTotals::default(),
        };
        threads.push(
            std::thread::Builder::new()
                .name(format!("lane{lane}-encode"))
                .spawn(move || encoder.run(&jobs_in))?,
        );
        let sender =
            SenderThread { lane, context: context.clone(), window: Arc::clone(&window), writer };
        threads.push(
            std::thread::Builder::new()
                .name(format!("lane{lane}-send"))
                .spawn(move || sender.run(&frames_in))?,
        );
        Ok(Self { jobs, window, threads })
    }

    /// Gives the lane its share of a round. The lane must be idle.
    pub fn send_round(&self, round: u32, rearm: bool, pages: Arc<PageSet>) {
        // A lane that has failed has said so already.
        let _ = self.jobs.send(Job { round, rearm, pages });
    }

    /// Ends the threads. The channel must be closed, or idle.
    pub fn join(self) {
        drop(self.jobs);
        self.window.close();
        for thread in self.threads {
            // A panic in a lane was reported by its absence: the migration has ended.
            let _ = thread.join();
        }
    }
}

struct EncoderThread {
    lane: u8,
    context: LaneContext,
    window: Arc<Window<FrameBuffer>>,
    frames: Sender<Outgoing>,
    encoder: Encoder,
    rearm_words: Vec<u64>,
    sequence: u64,
    totals: LaneTotals,
}

/// The window was closed or the sender is gone: whoever did that has reported why.
struct Stopped;

enum LaneFailure {
    Stopped,
    Error(MigrateError),
}

impl From<Stopped> for LaneFailure {
    fn from(_: Stopped) -> Self {
        Self::Stopped
    }
}

impl<E: Into<MigrateError>> From<E> for LaneFailure {
    fn from(error: E) -> Self {
        Self::Error(error.into())
    }
}

impl EncoderThread {
    fn run(mut self, jobs: &Receiver<Job>) {
        let cpu = self.context.cpu.clone();
        let _cpu = cpu.count_this_thread();
        for job in jobs {
            match self.send_job(job) {
                Ok(()) => {}
                Err(LaneFailure::Stopped) => return,
                Err(LaneFailure::Error(error)) => {
                    let _ = self.context.results.send(Input::Failed(error));
                    return;
                }
            }
        }
    }

    fn send_job(&mut self, job: Job) -> Result<(), LaneFailure> {
        let Job { round, rearm, pages } = job;
        self.totals = LaneTotals::default();
        for (slot, bitmap) in pages.iter() {
            self.send_slot(round, rearm, slot, bitmap)?;
        }
        // The conductor reuses the set once every lane has reported.
        drop(pages);
        let mut frame = self.acquire()?;
        self.sequence += 1;
        self.encoder.end_of_round(&mut frame, round, self.sequence);
        self.totals.bytes += frame.wire_bytes() as u64;
        let end = Outgoing::EndOfRound { sequence: self.sequence, frame, totals: self.totals };
        self.frames.send(end).map_err(|_| Stopped)?;
        Ok(())
    }

    /// Visits this lane's stripes only: stripe `s` holds pages `s * 512 ..`, eight words.
    fn send_slot(
        &mut self,
        round: u32,
        rearm: bool,
        slot: SlotId,
        bitmap: &PageBitmap,
    ) -> Result<(), LaneFailure> {
        const STRIPE_WORDS: usize = (LANE_STRIPE_PAGES / 64) as usize;
        let mut batch = [0_u64; FRAME_PAGES];
        let mut filled = 0;
        let stripes = bitmap.words().chunks(STRIPE_WORDS).enumerate();
        let ours = stripes.skip(usize::from(self.lane)).step_by(usize::from(self.context.lanes));
        for (stripe, words) in ours {
            for (index, &word) in words.iter().enumerate() {
                let mut word = word;
                let first = ((stripe * STRIPE_WORDS + index) * 64) as u64;
                while word != 0 {
                    let page = first + u64::from(word.trailing_zeros());
                    word &= word - 1;
                    if filled == FRAME_PAGES || (filled > 0 && page - batch[0] >= REARM_SPAN_PAGES)
                    {
                        self.send_batch(round, rearm, slot, &batch[..filled])?;
                        filled = 0;
                    }
                    batch[filled] = page;
                    filled += 1;
                }
            }
        }
        if filled > 0 {
            self.send_batch(round, rearm, slot, &batch[..filled])?;
        }
        Ok(())
    }

    fn send_batch(
        &mut self,
        round: u32,
        rearm: bool,
        slot: SlotId,
        pages: &[u64],
    ) -> Result<(), LaneFailure> {
        let mut frame = self.acquire()?;
        if rearm {
            self.rearm(slot, pages)?;
        }
        // The one look at live memory: everything after works on the copy.
        let copy = frame.pages_mut(pages.len());
        let mut at = 0;
        for run in runs(slot, pages) {
            let bytes = run.pages as usize * PAGE_SIZE;
            self.context.memory.copy_out(run, &mut copy[at..at + bytes])?;
            at += bytes;
        }
        self.sequence += 1;
        let counts = self.encoder.encode(
            &mut frame,
            round,
            self.sequence,
            slot,
            pages,
            &self.context.hashes,
        );
        self.totals.content_pages += counts.content_pages;
        self.totals.zero_pages += counts.zero_pages;
        self.totals.bytes += frame.wire_bytes() as u64;
        let outgoing = Outgoing::Frame { sequence: self.sequence, frame };
        self.frames.send(outgoing).map_err(|_| Stopped)?;
        Ok(())
    }

    fn rearm(&mut self, slot: SlotId, pages: &[u64]) -> Result<(), LaneFailure> {
        let first_word = pages[0] / 64;
        let words = (pages[pages.len() - 1] / 64 - first_word + 1) as usize;
        self.rearm_words.clear();
        self.rearm_words.resize(words, 0);
        for page in pages {
            self.rearm_words[(page / 64 - first_word) as usize] |= 1 << (page % 64);
        }
        self.context.log.rearm(slot, first_word as usize, &self.rearm_words)?;
        Ok(())
    }

    fn acquire(&self) -> Result<FrameBuffer, Stopped> {
        self.window.acquire(FrameBuffer::new).ok_or(Stopped)
    }
}

/// Pages in one frame lie at most so far apart, so that one call re-arms them all with a bitmap
/// of 4 KiB.
const REARM_SPAN_PAGES: u64 = 32_768;

/// Neighbouring page numbers as runs.
fn runs(slot: SlotId, pages: &[u64]) -> impl Iterator<Item = PageRun> + '_ {
    pages.chunk_by(|a, b| a + 1 == *b).map(move |run| PageRun {
        slot,
        first: run[0],
        pages: run.len() as u64,
    })
}

struct SenderThread {
    lane: u8,
    context: LaneContext,
    window: Arc<Window<FrameBuffer>>,
    writer: ChannelWriter,
}

impl SenderThread {
    fn run(mut self, frames: &Receiver<Outgoing>) {
        let cpu = self.context.cpu.clone();
        let _cpu = cpu.count_this_thread();
        for outgoing in frames {
            let (sequence, frame, totals) = match outgoing {
                Outgoing::Frame { sequence, frame } => (sequence, frame, None),
                Outgoing::EndOfRound { sequence, frame, totals } => (sequence, frame, Some(totals)),
            };
            if !self.context.limiter.take(frame.wire_bytes() as u64) {
                return;
            }
            let written = frame.write_to(&mut self.writer).and_then(|()| match totals {
                Some(_) => self.writer.flush(),
                None => Ok(()),
            });
            if let Err(error) = written {
                let error = lost(&format!("lane {}", self.lane), "sending pages", &error);
                let _ = self.context.results.send(Input::LaneLost(error));
                self.window.close();
                return;
            }
            self.context
                .sent_bytes
                .fetch_add(frame.wire_bytes() as u64, std::sync::atomic::Ordering::Relaxed);
            self.window.sent(sequence, frame);
            if let Some(totals) = totals {
                let sent = Input::LaneSent { lane: self.lane, end_sequence: sequence, totals };
                let _ = self.context.results.send(sent);
            }
        }
    }
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
