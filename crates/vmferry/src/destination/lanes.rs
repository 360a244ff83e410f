//! The lanes of the destination: a thread that receives and one that places, for each.
//!
//! Two threads, so that the next frame is read (and decrypted) while one is being placed. Frames
//! are placed in the order of their numbers, which must be without gaps: a page always has the
//! lane that its number gives it, so no version of it can overtake another.

use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender};
use vmferry_codec::{CodecError, Decoder, Frame, PageHashes, ReadError};
use vmferry_memory::GuestMemory;
use vmferry_transport::{ChannelCloser, ChannelReader, ChannelWriter};
use vmferry_wire::{ControlMessage, FrameHeader, FrameKind, Run};

use super::io::Input;
use crate::config::{LANE_STRIPE_PAGES, lane_of};
use crate::cpu::CpuMeter;
use crate::error::MigrateError;
use crate::link::{ControlWriter, lost};

/// Frames on their way from the receiving to the placing thread. Four of 256 KiB keep both busy
/// and stay in the cache.
const QUEUE_FRAMES: usize = 4;

/// Frames between two acknowledgements: 1 MiB, so that the source's window of 64 MiB turns over
/// smoothly and the control channel carries few of them.
const ACKNOWLEDGE_FRAMES: u64 = 4;

/// What all lanes of a session share.
#[derive(Clone)]
pub struct LaneContext {
    /// The guest's memory.
    pub memory: GuestMemory,
    /// Hashes of the pages as last placed.
    pub hashes: Arc<PageHashes>,
    /// Where acknowledgements go.
    pub control: Arc<ControlWriter<ChannelWriter>>,
    /// Where results go.
    pub results: Sender<Input>,
    /// CPU time of the threads.
    pub cpu: CpuMeter,
    /// What was placed.
    pub placed: Arc<PlacedCounters>,
    /// Number of lanes.
    pub lanes: u8,
}

/// What all lanes have placed so far.
#[derive(Debug, Default)]
pub struct PlacedCounters {
    /// Frames.
    pub frames: AtomicU64,
    /// Pages with content.
    pub content_pages: AtomicU64,
    /// Pages of zeros.
    pub zero_pages: AtomicU64,
    /// Bytes read.
    pub bytes: AtomicU64,
}

/// A lane at work.
pub struct Lane {
    closer: ChannelCloser,
    threads: Vec<JoinHandle<()>>,
    /// The sending half, kept open until the end.
    _writer: ChannelWriter,
}

impl Lane {
    /// Starts the lane's threads on its greeted channel.
    ///
    /// # Errors
    /// If the system has no thread left.
    pub fn start(
        lane: u8,
        context: &LaneContext,
        reader: ChannelReader,
        writer: ChannelWriter,
        closer: ChannelCloser,
    ) -> std::io::Result<Self> {
        let (full, full_in) = crossbeam_channel::bounded(QUEUE_FRAMES);
        let (empty, empty_in) = crossbeam_channel::bounded(QUEUE_FRAMES);
        for _ in 0..QUEUE_FRAMES {
            // The queue is as long as the number of frames.
            let _ = empty.send(Frame::new());
        }
        let receiving = ReceivingThread { lane, context: context.clone(), reader, offset: 0 };
        let placing = PlacingThread {
            lane,
            context: context.clone(),
            decoder: Decoder::new(),
            unacknowledged: 0,
        };
        let mut threads = Vec::with_capacity(2);
        let named = |role: &str| std::thread::Builder::new().name(format!("lane{lane}-{role}"));
        threads.push(named("receive").spawn(move || receiving.run(&empty_in, &full))?);
        threads.push(named("place").spawn(move || placing.run(&full_in, &empty))?);
        Ok(Self { closer, threads, _writer: writer })
    }

    /// Closes the channel and waits until no thread touches the guest's memory any more.
    pub fn end(self) {
        self.closer.close();
        for thread in self.threads {
            // A panic there has been noticed as a lost lane.
            let _ = thread.join();
        }
    }
}

/// A frame and where on the channel it ended.
type Received = (Frame, u64);

struct ReceivingThread {
    lane: u8,
    context: LaneContext,
    reader: ChannelReader,
    offset: u64,
}

impl ReceivingThread {
    fn run(mut self, empty: &Receiver<Frame>, full: &Sender<Received>) {
        let cpu = self.context.cpu.clone();
        let _cpu = cpu.count_this_thread();
        let mut sequence = 0;
        for mut frame in empty {
            match self.receive(&mut frame, sequence + 1) {
                Ok(header) => sequence = header.sequence,
                Err(error) => {
                    let input = match error {
                        error @ MigrateError::LinkLost { .. } => Input::LaneLost(error),
                        error => Input::Failed(error),
                    };
                    let _ = self.context.results.send(input);
                    return;
                }
            }
            if full.send((frame, self.offset)).is_err() {
                return;
            }
        }
    }

    fn receive(&mut self, frame: &mut Frame, expected: u64) -> Result<FrameHeader, MigrateError> {
        let channel = || format!("lane {}", self.lane);
        let offset = self.offset;
        let protocol =
            |reason: String| MigrateError::Protocol { channel: channel(), offset, reason };
        let mut counted = Counted { reader: &mut self.reader, bytes: 0 };
        let read = frame.read_from(&mut counted);
        let bytes = counted.bytes;
        self.offset += bytes;
        self.context.placed.bytes.fetch_add(bytes, Ordering::Relaxed);
        let header = match read {
            Ok(Some(header)) => header,
            Ok(None) => {
                let end = std::io::ErrorKind::UnexpectedEof.into();
                return Err(lost(&channel(), "receiving pages", &end));
            }
            Err(ReadError::Io(error)) => return Err(lost(&channel(), "receiving pages", &error)),
            Err(ReadError::Wire(error)) => return Err(protocol(error.to_string())),
        };
        if header.sequence != expected {
            return Err(protocol(format!(
                "frame {} came where {expected} was due",
                header.sequence
            )));
        }
        Ok(header)
    }
}

struct Counted<'a> {
    reader: &'a mut ChannelReader,
    bytes: u64,
}

impl Read for Counted<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let read = self.reader.read(into)?;
        self.bytes += read as u64;
        Ok(read)
    }
}

struct PlacingThread {
    lane: u8,
    context: LaneContext,
    decoder: Decoder,
    unacknowledged: u64,
}

impl PlacingThread {
    fn run(mut self, full: &Receiver<Received>, empty: &Sender<Frame>) {
        let cpu = self.context.cpu.clone();
        let _cpu = cpu.count_this_thread();
        for (frame, offset) in full {
            if let Err(input) = self.place(&frame, offset) {
                let _ = self.context.results.send(*input);
                return;
            }
            // The receiving thread may have ended; then no frame is needed any more.
            let _ = empty.send(frame);
        }
    }

    fn place(&mut self, frame: &Frame, offset: u64) -> Result<(), Box<Input>> {
        let Some(header) = frame.header() else { return Ok(()) };
        let failed = |reason: String| {
            let channel = format!("lane {}", self.lane);
            Box::new(Input::Failed(MigrateError::Protocol { channel, offset, reason }))
        };
        let context = &self.context;
        let counts = self
            .decoder
            .place(frame, &context.memory, &context.hashes, |run| {
                run_belongs(run, self.lane, context.lanes)
            })
            .map_err(|error| match error {
                CodecError::Memory(error) => Box::new(Input::Failed(error.into())),
                error => failed(error.to_string()),
            })?;
        let placed = &context.placed;
        placed.frames.fetch_add(1, Ordering::Relaxed);
        placed.content_pages.fetch_add(counts.content_pages, Ordering::Relaxed);
        placed.zero_pages.fetch_add(counts.zero_pages, Ordering::Relaxed);
        let end = header.kind == FrameKind::EndOfRound;
        self.unacknowledged += 1;
        if end || self.unacknowledged == ACKNOWLEDGE_FRAMES {
            self.unacknowledged = 0;
            let message = ControlMessage::Placed { lane: self.lane, sequence: header.sequence };
            context.control.send(&message).map_err(|error| {
                Box::new(Input::LaneLost(lost("control", "acknowledging pages", &error)))
            })?;
        }
        if end {
            let sequence = header.sequence;
            let _ = context.results.send(Input::LaneEnded { lane: self.lane, sequence });
        }
        Ok(())
    }
}

/// Whether all pages of a run travel on this lane.
fn run_belongs(run: &Run, lane: u8, lanes: u8) -> bool {
    let last = run.first + u64::from(run.pages.max(1)) - 1;
    let one_stripe = run.first / LANE_STRIPE_PAGES == last / LANE_STRIPE_PAGES;
    lanes == 1 || (one_stripe && lane_of(run.first, lanes) == lane)
}

#[cfg(test)]
mod tests {
    use vmferry_wire::Encoding;

    use super::*;

    #[test]
    fn a_run_belongs_to_one_lane_whole() {
        let run = |first, pages| Run { first, pages, encoding: Encoding::Raw };
        assert!(run_belongs(&run(0, 512), 0, 2));
        assert!(!run_belongs(&run(0, 513), 0, 2));
        assert!(run_belongs(&run(0, 5000), 0, 1));
        assert!(!run_belongs(&run(512, 1), 0, 2));
        assert!(run_belongs(&run(512, 1), 1, 2));
    }
}
