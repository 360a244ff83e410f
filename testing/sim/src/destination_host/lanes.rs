//! The destination's lanes, which outlive their channels, and a reconnected control channel.

use std::io::Cursor;
use std::sync::Arc;

use vmferry::MigrateError;
use vmferry::data::destination::place::{FrameReader, LaneProgress, PlacedCounters, Placer};
use vmferry::machine::destination::io::{Input, LinkId};
use vmferry_codec::Decompressors;
use vmferry_wire::{ControlMessage, Hello, HelloStatus};

use super::lane::Lane;
use super::session::Session;
use crate::guest::Guest;
use crate::host::Host;
use crate::network::{ChannelId, Network};
use crate::plan::Sabotage;

impl Session {
    /// Adds a data channel to a lane, possibly not its first. Returns the answer, and the lane's
    /// last placed frame.
    pub(super) fn join(
        &mut self,
        channel: ChannelId,
        hello: &Hello,
        network: &mut Network,
    ) -> Result<u64, HelloStatus> {
        let Some((memory, hashes)) = &self.memory else { return Err(HelloStatus::BadToken) };
        if hello.token != self.token {
            return Err(HelloStatus::BadToken);
        }
        if let Some(fetch) = self.fetch.as_mut().filter(|fetch| fetch.has(hello.lane)) {
            return fetch.join(channel, hello, self.vm.guest(), network);
        }
        if hello.lane >= self.expected_lanes {
            return Err(HelloStatus::BadLane);
        }
        let Some(lane) = self.lanes.get_mut(&hello.lane) else {
            let lane = Lane {
                channel,
                attempt: hello.attempt,
                frames: FrameReader::new(hello.lane, Cursor::default()),
                placer: Placer::new(
                    self.expected_lanes,
                    memory.clone(),
                    Arc::clone(hashes),
                    Arc::<PlacedCounters>::default(),
                    Decompressors::default(),
                ),
                progress: LaneProgress::default(),
                ended: false,
                failed: false,
                last: 0,
            };
            self.lanes.insert(hello.lane, lane);
            return Ok(0);
        };
        if hello.attempt <= lane.attempt {
            return Err(HelloStatus::BadLane);
        }
        network.close(lane.channel, Host::Destination);
        (lane.channel, lane.attempt, lane.ended) = (channel, hello.attempt, false);
        if lane.failed {
            return Err(HelloStatus::BadLane);
        }
        let mut placed = lane.progress.placed();
        if self.sabotage == Some(Sabotage::PlaceTwice) {
            placed = placed.saturating_sub(1);
        }
        lane.frames = FrameReader::after(hello.lane, Cursor::default(), placed);
        Ok(placed)
    }

    /// Continues with a source that has reconnected the control channel.
    pub(super) fn resume(
        &mut self,
        channel: ChannelId,
        hello: &Hello,
        network: &mut Network,
    ) -> HelloStatus {
        if hello.token != self.token || hello.attempt <= self.attempt {
            return HelloStatus::BadToken;
        }
        if !self.machine.may_resume() {
            return HelloStatus::TooLate;
        }
        self.attempt = hello.attempt;
        if let Some(old) = self.links.insert(LinkId::CONTROL, channel) {
            network.close(old, Host::Destination);
        }
        HelloStatus::Ok
    }

    /// Acknowledges the last placed frame of every lane.
    pub(super) fn acknowledge(&self, network: &mut Network) {
        let Some(control) = self.links.get(&LinkId::CONTROL) else { return };
        for (&lane, at) in &self.lanes {
            let sequence = at.progress.placed();
            network.say(*control, Host::Source, &ControlMessage::Placed { lane, sequence });
        }
    }

    /// The lane that has a channel.
    pub(super) fn lane_of(&self, channel: ChannelId) -> Option<u8> {
        self.lanes.iter().find(|(_, lane)| lane.channel == channel).map(|(number, _)| *number)
    }

    /// A lane's channel is gone.
    pub(super) fn lane_lost(
        &mut self,
        number: u8,
        error: MigrateError,
        network: &mut Network,
    ) -> Option<Input> {
        let lane = self.lanes.get_mut(&number)?;
        if std::mem::replace(&mut lane.ended, true) {
            return None;
        }
        // If only one direction is cut, the source must notice the end too.
        network.close(lane.channel, Host::Destination);
        Some(Input::LaneLost { lane: number, attempt: lane.attempt, error })
    }

    /// Places a frame, or a part of one that was cut off. It must be the one after the last frame,
    /// whatever its channel.
    pub(super) fn place(
        &mut self,
        number: u8,
        bytes: &[u8],
        guest: &Guest,
        network: &mut Network,
    ) -> Option<Input> {
        let control = self.links.get(&LinkId::CONTROL).copied();
        let again = self.sabotage == Some(Sabotage::PlaceTwice);
        let lane = self.lanes.get_mut(&number).filter(|lane| !lane.ended)?;
        lane.frames.get_mut().get_mut().extend_from_slice(bytes);
        let offset = lane.frames.offset();
        let header = match lane.receive(number, offset, again) {
            Ok(Some(header)) => header,
            Ok(None) => return None,
            Err(error @ MigrateError::LinkLost { .. }) => {
                return self.lane_lost(number, error, network);
            }
            Err(error) => {
                (lane.ended, lane.failed) = (true, true);
                return Some(Input::Failed(error));
            }
        };
        let last = std::mem::replace(&mut lane.last, header.sequence);
        if header.sequence != last + 1 {
            let frame = header.sequence;
            guest.violation(format!("lane {number}: frame {frame} is placed after frame {last}"));
        }
        let placed = lane.progress.finished(&header);
        if let (Some(sequence), Some(control)) = (placed.acknowledge, control) {
            network.say(control, Host::Source, &ControlMessage::Placed { lane: number, sequence });
        }
        placed.ended.map(|sequence| Input::LaneEnded { lane: number, sequence })
    }
}
