//! The lanes of a guest whose memory is placed here: a receiving thread for each, and placers that
//! decode and place for all of them.
//!
//! The next frame is read and decrypted while others are decoded and placed. Frames of one round
//! are placed in the order in which placers finish them. A lane's next round waits until the
//! previous one is completely placed.
//!
//! A lane outlives its channel. On a new channel the source continues after the last frame up to
//! which everything is placed. Later frames that were already placed are read and ignored.

mod lane_state;
mod placers;
mod receiver;

use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::Sender;
use vmferry_codec::Decompressors;
use vmferry_wire::ControlMessage;

use super::lane_channel::{LaneChannel, LanePosition};
use super::place::Placer;
use super::target::{LaneContext, LaneSet, MemoryTarget};
use crate::config::DestinationConfig;
use crate::config::compression::worker_threads;
use crate::link::DataChannel;
use lane_state::LaneState;
use placers::{PlacingThread, ReceivedFrame};
use receiver::ReceivingThread;

/// Frames of a lane that are read ahead while the placers are busy with others of the lane. A few
/// of 256 KiB keep both busy and stay in the cache.
const FRAMES_AHEAD: usize = 3;

/// All running lanes of a session. After a drop, no thread accesses the guest's memory.
pub struct MemoryLanes {
    context: LaneContext,
    target: MemoryTarget,
    received: Option<Sender<ReceivedFrame>>,
    placers: Vec<JoinHandle<()>>,
    lanes: Vec<Lane>,
}

struct Lane {
    shared: Arc<LaneState>,
    /// How often the lane's channel was dialed before.
    attempt: u64,
    channel: Option<LaneChannel>,
}

impl MemoryLanes {
    /// Starts the placers.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn start(
        context: LaneContext,
        target: MemoryTarget,
        config: &DestinationConfig,
    ) -> std::io::Result<Self> {
        let workers = worker_threads(config.workers);
        let longest = usize::from(context.lanes) * (workers + FRAMES_AHEAD);
        let (received, received_in) = crossbeam_channel::bounded(longest);
        let mut all = Self {
            context,
            target,
            received: Some(received),
            placers: Vec::new(),
            lanes: Vec::new(),
        };
        for number in 0..workers {
            let placer = PlacingThread {
                placer: placer(&all.context, &all.target, (config.decompressors)()),
                context: all.context.clone(),
            };
            let received = received_in.clone();
            let thread = std::thread::Builder::new()
                .name(format!("place{number}"))
                .spawn(move || placer.run(&received))?;
            all.placers.push(thread);
        }
        Ok(all)
    }
}

impl LaneSet for MemoryLanes {
    /// Everything that was read from the lane's previous channel is placed before this returns.
    fn expect(&mut self, lane: u8, attempt: u64) -> Option<u64> {
        let Some(known) = self.lanes.iter_mut().find(|known| known.shared.number() == lane) else {
            let shared = Arc::new(LaneState::new(lane, self.placers.len() + FRAMES_AHEAD));
            self.lanes.push(Lane { shared, attempt, channel: None });
            return Some(0);
        };
        if attempt <= known.attempt {
            return None;
        }
        known.attempt = attempt;
        known.end();
        known.shared.reopen()
    }

    fn join(&mut self, lane: u8, channel: DataChannel) -> std::io::Result<()> {
        let known = self.lanes.iter_mut().find(|known| known.shared.number() == lane);
        let (Some(known), Some(received)) = (known, self.received.clone()) else { return Ok(()) };
        let (attempt, sequence) = (known.attempt, known.shared.placed());
        let shared = Arc::clone(&known.shared);
        let placer = placer(&self.context, &self.target, Decompressors::default());
        let position = LanePosition { lane, attempt, sequence };
        known.channel =
            Some(LaneChannel::start(channel, position, &self.context, move |reader| {
                ReceivingThread { lane: shared, reader, placer, received }.run();
            })?);
        Ok(())
    }

    fn is_at(&self, lane: u8, attempt: u64) -> bool {
        self.lanes.iter().any(|known| known.shared.number() == lane && known.attempt == attempt)
    }

    fn acknowledge(&self) {
        for lane in &self.lanes {
            let (lane, sequence) = (lane.shared.number(), lane.shared.placed());
            self.context.control.send(&ControlMessage::Placed { lane, sequence });
        }
    }
}

impl Lane {
    /// Closes the channel and waits for the thread that reads it.
    fn end(&mut self) {
        self.shared.close();
        if let Some(channel) = self.channel.take() {
            channel.end();
        }
    }
}

fn placer(context: &LaneContext, target: &MemoryTarget, decompressors: Decompressors) -> Placer {
    Placer::new(
        context.lanes,
        target.memory.clone(),
        Arc::clone(&target.hashes),
        Arc::clone(&context.placed),
        decompressors,
    )
}

impl Drop for MemoryLanes {
    fn drop(&mut self) {
        self.lanes.iter_mut().for_each(Lane::end);
        // The receiving threads, which have ended, held the other senders.
        self.received = None;
        for placer in self.placers.drain(..) {
            let _ = placer.join();
        }
    }
}
