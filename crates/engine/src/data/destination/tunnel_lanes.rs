//! The fetch lanes of a carried guest at the destination, which are [tunnels](crate::data::tunnel).

use std::io;

use crossbeam_channel::Sender;
use parking_lot::Mutex;
use vmferry_wire::{FetchLanes as Announced, LaneOffer, LateStreamsId};

use crate::cpu::CpuMeter;
use crate::data::tunnel::{Tunnel, TunnelEnd, TunnelWay};
use crate::error::MigrateError;
use crate::link::DataChannel;
use crate::machine::destination::io::Input;

/// The tunnels of a session, which outlive their channels. After a drop, none of its threads is
/// left.
pub struct TunnelLanes {
    results: Sender<Input>,
    cpu: CpuMeter,
    lanes: Mutex<Lanes>,
}

struct Lanes {
    /// The number of the first lane.
    first: u8,
    /// In the order of the lanes.
    all: Vec<Lane>,
    /// What they carry.
    streams: LateStreamsId,
}

struct Lane {
    tunnel: Tunnel,
    /// How often the present channel was dialed before, if there was one.
    attempt: Option<u64>,
}

impl TunnelLanes {
    /// Tunnels without channels, of which the first has this number.
    #[must_use]
    pub fn new(first: u8, announced: Announced, results: Sender<Input>, cpu: &CpuMeter) -> Self {
        let count = announced.count();
        let all = (first..first.saturating_add(count)).map(|lane| new_lane(lane, cpu)).collect();
        let lanes = Lanes { first, all, streams: LateStreamsId::NONE };
        Self { results, cpu: cpu.clone(), lanes: Mutex::new(lanes) }
    }

    /// Tunnels of a session that an earlier receiver has left. The source's next offer says which.
    #[must_use]
    pub fn unannounced(results: Sender<Input>, cpu: &CpuMeter) -> Self {
        Self::new(0, Announced { faults: 0, background: 0 }, results, cpu)
    }

    /// Connects the tunnels, in their order, with the VMM, which has these streams.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn begin(
        &self,
        streams: LateStreamsId,
        ends: impl IntoIterator<Item = TunnelEnd>,
    ) -> io::Result<()> {
        let mut lanes = self.lanes.lock();
        lanes.streams = streams;
        lanes.all.iter_mut().zip(ends).try_for_each(|(lane, end)| lane.tunnel.begin(end))
    }

    /// What the tunnels carry.
    #[must_use]
    pub fn streams(&self) -> LateStreamsId {
        self.lanes.lock().streams
    }

    /// Replaces all tunnels by the offered ones, which carry nothing yet. What the old ones held is
    /// lost.
    pub fn restart(&self, offer: LaneOffer) {
        let LaneOffer { first, lanes: announced, .. } = offer;
        let numbers = first..first.saturating_add(announced.count());
        let all = numbers.map(|lane| new_lane(lane, &self.cpu)).collect();
        let fresh = Lanes { first, all, streams: LateStreamsId::NONE };
        let old = std::mem::replace(&mut *self.lanes.lock(), fresh);
        drop(old);
    }

    /// Expects new channels for all lanes, under the offered numbers.
    pub fn renew(&self, offer: LaneOffer) {
        let mut lanes = self.lanes.lock();
        lanes.first = offer.first;
        for lane in &mut lanes.all {
            lane.tunnel.detach();
            lane.attempt = None;
        }
    }

    /// Whether this is the number of a tunnel.
    #[must_use]
    pub fn has(&self, lane: u8) -> bool {
        self.lanes.lock().get(lane).is_some()
    }

    /// Prepares a lane for a channel that was dialed `attempt` times before. False if this attempt
    /// is not newer than the present channel's; it may be a replay.
    #[must_use]
    pub fn expect(&self, lane: u8, attempt: u64) -> bool {
        let mut lanes = self.lanes.lock();
        let Some(known) = lanes.get(lane) else { return false };
        if known.attempt.is_some_and(|present| attempt <= present) {
            return false;
        }
        known.attempt = Some(attempt);
        known.tunnel.detach();
        true
    }

    /// Uses a greeted channel for a lane that [expects](Self::expect) it.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn join(&self, lane: u8, channel: DataChannel) -> io::Result<()> {
        let mut lanes = self.lanes.lock();
        let Some(known) = lanes.get(lane) else { return Ok(()) };
        let (results, attempt) = (self.results.clone(), known.attempt.unwrap_or_default());
        let on_loss = Box::new(move |error| {
            let _ = results.send(match error {
                error @ MigrateError::LinkLost { .. } => Input::LaneLost { lane, attempt, error },
                error => Input::Failed(error),
            });
        });
        known.tunnel.attach(channel, on_loss)
    }

    /// Whether a lane's present channel is the one that was dialed this number of times before.
    #[must_use]
    pub fn is_at(&self, lane: u8, attempt: u64) -> bool {
        self.lanes.lock().get(lane).is_some_and(|lane| lane.attempt == Some(attempt))
    }
}

fn new_lane(number: u8, cpu: &CpuMeter) -> Lane {
    Lane { tunnel: Tunnel::new(number, TunnelWay::default(), cpu.clone()), attempt: None }
}

impl Lanes {
    fn get(&mut self, lane: u8) -> Option<&mut Lane> {
        let index = usize::from(lane.checked_sub(self.first)?);
        self.all.get_mut(index)
    }
}
