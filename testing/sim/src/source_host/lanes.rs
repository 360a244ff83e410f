//! The source's lanes. Each keeps the frames it has sent until the destination has placed them, and
//! outlives its channel.

use std::collections::VecDeque;
use std::time::Duration;

use vmferry::data::source::plan::LanePlan;
use vmferry::link::{channel_name, lost};
use vmferry::machine::source::io::Input;
use vmferry::rounds::tracker::LaneTotals;
use vmferry_wire::{Role, Token};

use super::Process;
use super::dialing::{greeted, hello};
use crate::host::Host;
use crate::network::{ChannelId, Event, Network};
use crate::plan::Sabotage;

pub(super) struct Lane {
    pub(super) plan: LanePlan,
    pub(super) channel: ChannelId,
    /// How often its channel was dialed before.
    pub(super) attempt: u64,
    greeted: bool,
    /// Its channel ended before all lanes had one.
    ended_early: bool,
    /// A frame could not be sent, and the following ones wait for the next channel.
    waits: bool,
    /// The number of frames made so far, which numbers the frames.
    pub(super) sequence: u64,
    /// Frames that are made and not sent.
    pub(super) queue: VecDeque<Frame>,
    /// Frames that are sent and not known to be placed.
    kept: VecDeque<(u64, Vec<u8>)>,
}

/// A frame's number and bytes, and the round that it ends, if it does.
pub(super) struct Frame {
    pub(super) sequence: u64,
    pub(super) bytes: Vec<u8>,
    pub(super) end: Option<LaneTotals>,
}

impl Process {
    pub(super) fn open_lanes(&mut self, token: Token, network: &mut Network) {
        for number in 0..self.channels {
            let channel = network.open();
            network.send(channel, Host::Destination, "greeting", hello(Role::Data, number, token));
            self.lanes.push(Lane {
                plan: LanePlan::new(number, self.channels),
                channel,
                attempt: 0,
                greeted: false,
                ended_early: false,
                waits: false,
                sequence: 0,
                queue: VecDeque::new(),
                kept: VecDeque::new(),
            });
        }
    }

    pub(super) fn lane_of(&self, channel: ChannelId) -> Option<u8> {
        self.lanes.iter().position(|lane| lane.channel == channel).map(|lane| lane as u8)
    }

    /// Handles bytes on a lane's channel: only the answer to its greeting is allowed.
    pub(super) fn heard_on_lane(&mut self, number: u8, bytes: &[u8]) -> Vec<Input> {
        let lane = &mut self.lanes[usize::from(number)];
        if lane.greeted {
            let error = std::io::Error::other("the destination sends on a data channel");
            return vec![self.lane_lost(number, &error)];
        }
        if let Err(error) = greeted(bytes) {
            return vec![Input::Failed(error)];
        }
        lane.greeted = true;
        if !self.lanes.iter().all(|lane| lane.greeted) {
            return Vec::new();
        }
        let ended = (0..self.channels).filter(|lane| self.lanes[usize::from(*lane)].ended_early);
        let lost = ended.map(|lane| self.lane_lost(lane, &end_of_stream()));
        std::iter::once(Input::LanesJoined).chain(lost).collect()
    }

    /// The channel of a lane has ended.
    pub(super) fn lane_ended(&mut self, number: u8) -> Option<Input> {
        let all_greeted = self.lanes.iter().all(|lane| lane.greeted);
        let lane = &mut self.lanes[usize::from(number)];
        if all_greeted {
            return Some(self.lane_lost(number, &end_of_stream()));
        }
        lane.ended_early = true;
        let error = || lost(&channel_name(Some(number)), "the greeting", &end_of_stream());
        (!lane.greeted).then(|| Input::Failed(error()))
    }

    fn lane_lost(&self, lane: u8, error: &std::io::Error) -> Input {
        let attempt = self.lanes[usize::from(lane)].attempt;
        let error = lost(&channel_name(Some(lane)), "sending pages", error);
        Input::LaneLost { lane, attempt, error }
    }

    /// Whether a lane's present channel was dialed this often before.
    pub(super) fn is_at(&self, lane: u8, attempt: u64) -> bool {
        self.fetch.is_at(lane, attempt)
            || self.lanes.get(usize::from(lane)).is_some_and(|lane| lane.attempt == attempt)
    }

    /// The destination has placed all frames of a lane up to this one.
    pub(super) fn placed(&mut self, lane: u8, sequence: u64) {
        if let Some(lane) = self.lanes.get_mut(usize::from(lane)) {
            lane.kept.retain(|(kept, _)| *kept > sequence);
        }
    }

    /// Sends the queued frames until the channel turns out to be lost.
    pub(super) fn send_queued(&mut self, number: u8, network: &mut Network) {
        let process = self.number;
        let lane = &mut self.lanes[usize::from(number)];
        while !lane.waits
            && let Some(Frame { sequence, bytes, end }) = lane.queue.pop_front()
        {
            lane.waits = !network.send(lane.channel, Host::Destination, "frame", bytes.clone());
            lane.kept.push_back((sequence, bytes));
            if let Some(totals) = end {
                let input = Input::LaneSent { lane: number, end_sequence: sequence, totals };
                let takes = Duration::from_micros(network.rng.u64(1..3_000));
                network.after(takes, Event::Source(process, input));
            }
        }
        self.tell_of_loss(number, network);
    }

    fn tell_of_loss(&self, lane: u8, network: &mut Network) {
        if self.lanes[usize::from(lane)].waits {
            let input = self.lane_lost(lane, &std::io::ErrorKind::BrokenPipe.into());
            network.after(Duration::ZERO, Event::Source(self.number, input));
        }
    }

    /// Continues a lane on a new channel. Frames that are not placed are sent again first.
    pub(super) fn rejoin(
        &mut self,
        number: u8,
        attempt: u64,
        channel: ChannelId,
        placed: u64,
        network: &mut Network,
    ) -> Input {
        self.placed(number, placed);
        let forget = self.sabotage == Some(Sabotage::ForgetKept);
        let lane = &mut self.lanes[usize::from(number)];
        (lane.channel, lane.attempt, lane.waits) = (channel, attempt, false);
        if forget {
            lane.kept.clear();
        }
        let (mut frames, mut bytes) = (0, 0);
        for (_, kept) in &lane.kept {
            if !network.send(channel, Host::Destination, "frame again", kept.clone()) {
                lane.waits = true;
                break;
            }
            (frames, bytes) = (frames + 1, bytes + kept.len() as u64);
        }
        let takes = Duration::from_micros(network.rng.u64(1..3_000));
        let resent = Input::Resent { lane: number, frames, bytes };
        network.after(takes, Event::Source(self.number, resent));
        if lane.waits {
            self.tell_of_loss(number, network);
        } else {
            self.send_queued(number, network);
        }
        Input::LaneRejoined { lane: number, placed }
    }
}

fn end_of_stream() -> std::io::Error {
    std::io::ErrorKind::UnexpectedEof.into()
}
