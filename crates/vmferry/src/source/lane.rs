//! The threads of one lane of the source: one reads and encodes, and one sends.

use std::io::Write;
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender};
use vmferry_codec::PageHashes;
use vmferry_dirty::DirtyLog;
use vmferry_memory::GuestMemory;
use vmferry_transport::{ChannelWriter, RateLimiter};

use super::encode::{FrameSink, Job, LaneEncoder, LaneFailure};
use super::io::Input;
use super::rounds::LaneTotals;
use super::window::Window;
use crate::cpu::CpuMeter;
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

/// What the encoder hands to the sender.
struct Outgoing {
    sequence: u64,
    frame: FrameBuffer,
    /// With the round's last frame.
    end: Option<LaneTotals>,
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
            encoder: LaneEncoder::new(
                lane,
                context.lanes,
                context.memory.clone(),
                Arc::clone(&context.log),
                Arc::clone(&context.hashes),
            ),
            sink: ToSender { window: Arc::clone(&window), frames },
            results: context.results.clone(),
            cpu: context.cpu.clone(),
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
    pub fn send_round(&self, job: Job) {
        // A lane that has failed has said so already.
        let _ = self.jobs.send(job);
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
    encoder: LaneEncoder,
    sink: ToSender,
    results: Sender<Input>,
    cpu: CpuMeter,
}

impl EncoderThread {
    fn run(mut self, jobs: &Receiver<Job>) {
        let cpu = self.cpu.clone();
        let _cpu = cpu.count_this_thread();
        for job in jobs {
            match self.encoder.send_round(job, &mut self.sink) {
                Ok(()) => {}
                Err(LaneFailure::Stopped) => return,
                Err(LaneFailure::Error(error)) => {
                    let _ = self.results.send(Input::Failed(error));
                    return;
                }
            }
        }
    }
}

/// Frames out of the window, and on to the sending thread.
struct ToSender {
    window: Arc<Window<FrameBuffer>>,
    frames: Sender<Outgoing>,
}

impl FrameSink for ToSender {
    fn acquire(&mut self) -> Option<FrameBuffer> {
        self.window.acquire(FrameBuffer::new)
    }

    fn send(&mut self, sequence: u64, frame: FrameBuffer, end: Option<LaneTotals>) -> bool {
        self.frames.send(Outgoing { sequence, frame, end }).is_ok()
    }
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
            let Outgoing { sequence, frame, end: totals } = outgoing;
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
