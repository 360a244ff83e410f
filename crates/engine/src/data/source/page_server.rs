//! Answers a destination's requests for pages on one fetch lane, while the guest runs there.
//!
//! The guest is paused here for good, so a page is read whenever it is asked for. Each request is
//! answered at once with a frame of its own. A page that a vCPU waits for is not compressed, and
//! the bandwidth cap does not delay it. Background pages are compressed as in pre-copy, and count
//! for the cap.

use std::io::{self, BufReader, Read, Write};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam_channel::Sender;
use parking_lot::Mutex;
use vmferry_codec::{Choice, DeltaUse, EncodedFrame, FrameCounts};
use vmferry_memory::{PageRun, PageSet};
use vmferry_transport::{ChannelCloser, ChannelReader, ChannelWriter, RateLimiter};
use vmferry_wire::{PAGE_REQUEST_BYTES, PageRequest};

use super::chooser::Chooser;
use super::lane::plan::PageBatch;
use super::page_encoder::PageEncoder;
use super::sent::SentCounters;
use crate::cpu::CpuMeter;
use crate::error::MigrateError;
use crate::link::{DataChannel, channel_name, lost};
use crate::machine::source::io::Input;

/// What a fetch lane is, and what it reports to.
pub struct FetchLaneContext {
    /// The lane's number. Fetch lanes are numbered after the data lanes.
    pub lane: u8,
    /// How often the lane's channel was dialed before.
    pub attempt: u64,
    /// What to serve, once FINAL is sent. A request before that violates the protocol.
    pub served: Arc<OnceLock<Served>>,
    /// How background pages are sent. `None` for a lane of pages that vCPUs wait for.
    pub background: Option<BackgroundWay>,
    /// Queue for the loss of the channel.
    pub results: Sender<Input>,
    /// CPU time of the threads.
    pub cpu: CpuMeter,
    /// Counters of what was sent, for progress displays.
    pub sent: Arc<SentCounters>,
}

/// What a source serves after FINAL.
#[derive(Debug)]
pub struct Served {
    /// The number of the round that the pages count as.
    pub round: u32,
    /// Pages that are zero and must not be read.
    pub zero: Option<Arc<PageSet>>,
    /// Pages that the destination lacks and that were not sent yet.
    pub unsent: Mutex<PageSet>,
}

impl Served {
    /// Notes that pages were sent. Returns how many of them were not sent before.
    fn sent(&self, run: PageRun) -> u64 {
        let mut unsent = self.unsent.lock();
        let bitmap = unsent.bitmap_mut(run.slot);
        let new =
            (run.first..run.first + run.pages).filter(|page| bitmap.is_set(*page)).count() as u64;
        bitmap.clear_run(run.first, run.pages);
        new
    }
}

/// How background pages are sent.
#[derive(Clone)]
pub struct BackgroundWay {
    /// The cap over all lanes.
    pub limiter: RateLimiter,
    /// Decides how pages are encoded.
    pub chooser: Arc<Chooser>,
}

/// The thread that serves one fetch lane. Dropping it closes the channel and waits for the thread.
pub struct PageServer {
    closer: ChannelCloser,
    thread: Option<JoinHandle<()>>,
}

impl PageServer {
    /// Serves requests on a greeted channel until it ends.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn start(
        channel: DataChannel,
        encoder: PageEncoder,
        context: FetchLaneContext,
    ) -> io::Result<Self> {
        let DataChannel { reader, writer, closer } = channel;
        let name = format!("lane{}-serve", context.lane);
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            let _cpu = context.cpu.count_this_thread();
            let frame = EncodedFrame::new();
            let mut serving = Serving { encoder, frame, context: &context, sequence: 0 };
            let error = serving.run(reader, writer);
            let FetchLaneContext { lane, attempt, results, .. } = &context;
            let _ = results.send(match error {
                error @ MigrateError::LinkLost { .. } => {
                    Input::LaneLost { lane: *lane, attempt: *attempt, error }
                }
                error => Input::Failed(error),
            });
        })?;
        Ok(Self { closer, thread: Some(thread) })
    }
}

impl Drop for PageServer {
    fn drop(&mut self) {
        self.closer.close();
        if let Some(thread) = self.thread.take() {
            // A panic there was noticed as a lane that no longer answers.
            let _ = thread.join();
        }
    }
}

struct Serving<'a> {
    encoder: PageEncoder,
    /// Reused for all answers.
    frame: EncodedFrame,
    context: &'a FetchLaneContext,
    /// Number of the last frame.
    sequence: u64,
}

/// Requests that are read at once.
const REQUESTS_AHEAD: usize = 64;

impl Serving<'_> {
    /// Serves until the channel ends, and returns why it did.
    fn run(&mut self, mut reader: ChannelReader, mut writer: ChannelWriter) -> MigrateError {
        // The destination asks when its guest needs a page, which may be never.
        if let Err(error) = reader.set_timeout(None) {
            return self.lost(&io::Error::other(error));
        }
        let mut requests = BufReader::with_capacity(REQUESTS_AHEAD * PAGE_REQUEST_BYTES, reader);
        let (mut offset, mut bytes) = (0, [0; PAGE_REQUEST_BYTES]);
        loop {
            if let Err(error) = requests.read_exact(&mut bytes) {
                return self.lost(&error);
            }
            if let Err(error) = self.answer(&bytes, offset, &mut writer) {
                return error;
            }
            offset += PAGE_REQUEST_BYTES as u64;
            if requests.buffer().is_empty()
                && let Err(error) = writer.flush()
            {
                return self.lost(&error);
            }
        }
    }

    fn answer(
        &mut self,
        request: &[u8; PAGE_REQUEST_BYTES],
        offset: u64,
        writer: &mut impl Write,
    ) -> Result<(), MigrateError> {
        let FetchLaneContext { lane, served, sent, .. } = self.context;
        let refused =
            |reason: String| MigrateError::protocol(channel_name(Some(*lane)), offset, reason);
        let request = PageRequest::parse(request).map_err(|error| refused(error.to_string()))?;
        let Some(served) = served.get() else {
            return Err(refused("a request for a page before FINAL".into()));
        };
        if let Err(error) = self.encoder.check(request.run()) {
            return Err(refused(format!("a request for pages that do not exist: {error}")));
        }
        let counts = self.encode(request.run(), served)?;
        self.sequence += 1;
        self.frame.set_sequence(self.sequence);
        let bytes = self.frame.wire_bytes() as u64;
        if let Some(BackgroundWay { limiter, .. }) = &self.context.background
            && !limiter.take(bytes)
        {
            return Err(self.lost(&io::Error::other("the migration ends")));
        }
        self.frame.write_to(writer).map_err(|error| self.lost(&error))?;
        sent.pages(&counts);
        sent.frame(bytes);
        sent.served_pages.fetch_add(served.sent(request.run()), Ordering::Relaxed);
        Ok(())
    }

    /// Makes the frame of some pages.
    fn encode(&mut self, run: PageRun, served: &Served) -> Result<FrameCounts, MigrateError> {
        let lane = self.context.lane;
        let mut batch = PageBatch::of_run(served.round, run);
        batch.zero.clone_from(&served.zero);
        let Some(BackgroundWay { chooser, .. }) = &self.context.background else {
            return self.encoder.encode(lane, &batch, &mut self.frame, Choice::default());
        };
        let decision = chooser.choose(false, served.round);
        // The guest may have written a page since it was placed, so nothing is a base for a delta.
        let choice = Choice { delta: DeltaUse::Off, ..decision.choice };
        let begun = Instant::now();
        let counts = self.encoder.encode(lane, &batch, &mut self.frame, choice)?;
        chooser.encoded(decision, counts, begun.elapsed());
        Ok(counts)
    }

    fn lost(&self, error: &io::Error) -> MigrateError {
        lost(&channel_name(Some(self.context.lane)), "serving pages", error)
    }
}
