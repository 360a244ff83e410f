//! The lanes of the destination: a thread that receives and one that places, for each.
//!
//! Two threads, so that the next frame is read (and decrypted) while one is being placed.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender};
use vmferry_codec::{Frame, PageHashes};
use vmferry_memory::GuestMemory;
use vmferry_transport::{ChannelCloser, ChannelReader, ChannelWriter};
use vmferry_wire::ControlMessage;

use super::io::Input;
use super::place::{FrameReader, Placed, PlacedCounters, Placer};
use crate::cpu::CpuMeter;
use crate::error::MigrateError;
use crate::link::{ControlWriter, lost};

/// Frames on their way from the receiving to the placing thread. Four of 256 KiB keep both busy
/// and stay in the cache.
const QUEUE_FRAMES: usize = 4;

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
        let receiving = ReceivingThread {
            frames: FrameReader::new(lane, reader),
            results: context.results.clone(),
            cpu: context.cpu.clone(),
            placed: Arc::clone(&context.placed),
        };
        let placing = PlacingThread {
            lane,
            placer: Placer::new(
                lane,
                context.lanes,
                context.memory.clone(),
                Arc::clone(&context.hashes),
                Arc::clone(&context.placed),
            ),
            control: Arc::clone(&context.control),
            results: context.results.clone(),
            cpu: context.cpu.clone(),
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

/// A frame and where on the channel it began.
type Received = (Frame, u64);

struct ReceivingThread {
    frames: FrameReader<ChannelReader>,
    results: Sender<Input>,
    cpu: CpuMeter,
    placed: Arc<PlacedCounters>,
}

impl ReceivingThread {
    fn run(mut self, empty: &Receiver<Frame>, full: &Sender<Received>) {
        let cpu = self.cpu.clone();
        let _cpu = cpu.count_this_thread();
        for mut frame in empty {
            let before = self.frames.offset();
            let received = self.frames.receive(&mut frame);
            self.placed.bytes.fetch_add(self.frames.offset() - before, Ordering::Relaxed);
            if let Err(error) = received {
                let input = match error {
                    error @ MigrateError::LinkLost { .. } => Input::LaneLost(error),
                    error => Input::Failed(error),
                };
                let _ = self.results.send(input);
                return;
            }
            if full.send((frame, before)).is_err() {
                return;
            }
        }
    }
}

struct PlacingThread {
    lane: u8,
    placer: Placer,
    control: Arc<ControlWriter<ChannelWriter>>,
    results: Sender<Input>,
    cpu: CpuMeter,
}

impl PlacingThread {
    fn run(mut self, full: &Receiver<Received>, empty: &Sender<Frame>) {
        let cpu = self.cpu.clone();
        let _cpu = cpu.count_this_thread();
        for (frame, offset) in full {
            let input = match self.placer.place(&frame, offset) {
                Ok(placed) => self.tell(placed),
                Err(error) => Some(Input::Failed(error)),
            };
            if let Some(input) = input {
                let last = !matches!(input, Input::LaneEnded { .. });
                let _ = self.results.send(input);
                if last {
                    return;
                }
            }
            // The receiving thread may have ended; then no frame is needed any more.
            let _ = empty.send(frame);
        }
    }

    fn tell(&mut self, placed: Placed) -> Option<Input> {
        let lane = self.lane;
        if let Some(sequence) = placed.acknowledge
            && let Err(error) = self.control.send(&ControlMessage::Placed { lane, sequence })
        {
            return Some(Input::LaneLost(lost("control", "acknowledging pages", &error)));
        }
        placed.ended.map(|sequence| Input::LaneEnded { lane, sequence })
    }
}
