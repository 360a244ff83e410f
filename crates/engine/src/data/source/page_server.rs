//! Answers a destination's requests for pages on one fault lane, while the guest runs there.
//!
//! The guest is paused here for good, so a page is read whenever it is asked for. Each request is
//! answered at once with a frame of its own, uncompressed: a vCPU waits for it. Requests have fault
//! lanes to themselves, so that they never wait behind background pages, and are not subject to the
//! bandwidth cap, which background pages are.

use std::io::{self, BufReader, Read, Write};
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::Sender;
use vmferry_codec::{Choice, EncodedFrame};
use vmferry_transport::{ChannelCloser, ChannelReader, ChannelWriter};
use vmferry_wire::{PAGE_REQUEST_BYTES, PageRequest};

use super::lane::plan::PageBatch;
use super::page_encoder::PageEncoder;
use super::sent::SentCounters;
use crate::cpu::CpuMeter;
use crate::error::MigrateError;
use crate::link::{DataChannel, channel_name, lost};
use crate::machine::source::io::Input;

/// What a fault lane is, and what it reports to.
pub struct FaultLaneContext {
    /// The lane's number. Fault lanes are numbered after the data lanes.
    pub lane: u8,
    /// How often the lane's channel was dialed before.
    pub attempt: u64,
    /// The round in which all missing pages are sent.
    pub round: u32,
    /// Queue for the loss of the channel.
    pub results: Sender<Input>,
    /// CPU time of the threads.
    pub cpu: CpuMeter,
    /// Counters of what was sent, for progress displays.
    pub sent: Arc<SentCounters>,
}

/// The thread that serves one fault lane. Dropping it closes the channel and waits for the thread.
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
        context: FaultLaneContext,
    ) -> io::Result<Self> {
        let DataChannel { reader, writer, closer } = channel;
        let name = format!("lane{}-serve", context.lane);
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            let _cpu = context.cpu.count_this_thread();
            let frame = EncodedFrame::new();
            let mut serving = Serving { encoder, frame, context: &context, sequence: 0 };
            let error = serving.run(reader, writer);
            let FaultLaneContext { lane, attempt, results, .. } = &context;
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
    context: &'a FaultLaneContext,
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
        let FaultLaneContext { lane, round, sent, .. } = self.context;
        let refused =
            |reason: String| MigrateError::protocol(channel_name(Some(*lane)), offset, reason);
        let request = PageRequest::parse(request).map_err(|error| refused(error.to_string()))?;
        let batch = PageBatch::of_run(*round, request.run());
        if let Err(error) = self.encoder.check(request.run()) {
            return Err(refused(format!("a request for pages that do not exist: {error}")));
        }
        let Self { encoder, frame, .. } = self;
        let counts = encoder.encode(*lane, &batch, frame, Choice::default())?;
        self.sequence += 1;
        frame.set_sequence(self.sequence);
        let (bytes, written) = (frame.wire_bytes(), frame.write_to(writer));
        written.map_err(|error| self.lost(&error))?;
        sent.pages(&counts);
        sent.frame(bytes as u64);
        Ok(())
    }

    fn lost(&self, error: &io::Error) -> MigrateError {
        lost(&channel_name(Some(self.context.lane)), "serving pages", error)
    }
}
