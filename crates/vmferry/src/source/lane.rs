//! The sending thread of one lane of the source.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam_channel::Sender;
use vmferry_codec::EncodedFrame;
use vmferry_transport::{ChannelWriter, RateLimiter};

use super::chooser::Chooser;
use super::io::Input;
use super::orders::SentCounters;
use super::pool::{Finished, FrameInfo, Maker, PoolLane};
use super::rounds::LaneTotals;
use crate::cpu::CpuMeter;
use crate::error::MigrateError;
use crate::link::lost;

/// What all lanes share.
#[derive(Clone)]
pub struct LaneContext {
    /// The cap over all lanes.
    pub limiter: RateLimiter,
    /// Learns how fast the link is.
    pub chooser: Arc<Chooser>,
    /// Where results go.
    pub results: Sender<Input>,
    /// CPU time of the threads.
    pub cpu: CpuMeter,
    /// What was handed to the channels so far, for progress displays.
    pub sent: Arc<SentCounters>,
}

/// A lane at work: sends its frames in order until its queue is closed.
pub struct Lane(Option<JoinHandle<()>>);

impl Lane {
    /// Starts the thread on the lane's greeted channel.
    ///
    /// # Errors
    /// If the system has no thread left.
    pub fn start(
        number: u8,
        lane: Arc<PoolLane>,
        maker: Maker,
        context: LaneContext,
        writer: ChannelWriter,
    ) -> std::io::Result<Self> {
        let sender = SenderThread {
            number,
            lane,
            maker,
            context,
            writer,
            sequence: 0,
            totals: LaneTotals::default(),
        };
        let thread = std::thread::Builder::new()
            .name(format!("lane{number}-send"))
            .spawn(|| sender.run())?;
        Ok(Self(Some(thread)))
    }
}

impl Drop for Lane {
    /// Waits for the thread. The queue must be closed, and the channel closed or idle.
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            // A panic in a lane was reported by its absence: the migration has ended.
            let _ = thread.join();
        }
    }
}

struct SenderThread {
    number: u8,
    lane: Arc<PoolLane>,
    maker: Maker,
    context: LaneContext,
    writer: ChannelWriter,
    /// Frames sent so far, which number them.
    sequence: u64,
    /// Of the round that is being sent.
    totals: LaneTotals,
}

impl SenderThread {
    fn run(mut self) {
        let cpu = self.context.cpu.clone();
        let _cpu = cpu.count_this_thread();
        let mut idle_since = Instant::now();
        loop {
            let Finished { mut frame, what } = match self.maker.next() {
                Ok(Some(finished)) => finished,
                Ok(None) => return,
                Err(error) => {
                    let _ = self.context.results.send(Input::Failed(error));
                    return;
                }
            };
            let begun = Instant::now();
            self.sequence += 1;
            frame.set_sequence(self.sequence);
            let bytes = frame.wire_bytes() as u64;
            if !self.context.limiter.take(bytes) {
                return;
            }
            if let Err(error) = self.write(&frame, &what) {
                let _ = self.context.results.send(Input::LaneLost(error));
                return;
            }
            let ended = Instant::now();
            self.context.chooser.sent(self.number, bytes, begun - idle_since, ended - begun);
            idle_since = ended;
            self.context.sent.bytes.fetch_add(bytes, Ordering::Relaxed);
            self.lane.window.sent(self.sequence, frame);
            self.count(bytes, what);
        }
    }

    fn write(&mut self, frame: &EncodedFrame, what: &FrameInfo) -> Result<(), MigrateError> {
        let written = frame.write_to(&mut self.writer).and_then(|()| match what {
            FrameInfo::EndOfRound(..) => self.writer.flush(),
            FrameInfo::Pages(..) => Ok(()),
        });
        written.map_err(|error| lost(&format!("lane {}", self.number), "sending pages", &error))
    }

    fn count(&mut self, bytes: u64, what: FrameInfo) {
        self.totals.bytes += bytes;
        match what {
            FrameInfo::Pages(counts, decision) => {
                self.context.sent.pages(&counts);
                self.totals.add(&counts, &decision);
            }
            FrameInfo::EndOfRound(rearm, log) => {
                self.totals.rearm = rearm;
                self.totals.log = log;
                let totals = std::mem::take(&mut self.totals);
                let (lane, end_sequence) = (self.number, self.sequence);
                let sent = Input::LaneSent { lane, end_sequence, totals };
                let _ = self.context.results.send(sent);
            }
        }
    }
}
