//! The source's fetch lanes with post-copy: channels on which the destination requests pages.

use std::io::{Error, ErrorKind};

use vmferry::MigrateError;
use vmferry::data::source::plan::PageBatch;
use vmferry::link::{channel_name, lost};
use vmferry::machine::source::io::Input;
use vmferry::rounds::lacking::lacking_messages;
use vmferry_codec::{Choice, DeltaUse, EncodedFrame};
use vmferry_memory::{PageRun, SlotId};
use vmferry_wire::{ControlMessage, PAGE_REQUEST_BYTES, PageRequest, Role, Token};

use super::Process;
use super::guest_side::CHOICES;
use crate::dial::Dial;
use crate::host::Host;
use crate::network::{ChannelId, Network};
use crate::plan::Sabotage;

/// All fetch lanes of a process.
pub(super) struct FetchServers {
    servers: Vec<Server>,
    /// The number of channels that are still being opened for the first time.
    opening: usize,
    /// The first lane that is not for faults.
    first_background: u8,
    /// The round that served pages count as. Before FINAL nothing is served.
    round: Option<u32>,
}

/// A fetch lane with its channel.
struct Server {
    lane: u8,
    /// How often its channel was dialed before.
    attempt: u64,
    channel: ChannelId,
    /// The number of the last frame.
    sequence: u64,
    /// A request of which a part has arrived.
    bytes: Vec<u8>,
    /// The channel has ended, or a request was wrong: nothing more is answered.
    ended: bool,
    /// Its end is not reported, because other lanes have no channels yet.
    ended_early: bool,
}

impl FetchServers {
    /// Servers without lanes.
    pub(super) fn new(first_background: u8) -> Self {
        Self { servers: Vec::new(), opening: 0, first_background, round: None }
    }

    /// Answers requests from now on.
    pub(super) fn serve(&mut self, round: u32) {
        self.round = Some(round);
    }

    /// All open channels.
    pub(super) fn channels(&self) -> impl Iterator<Item = ChannelId> + '_ {
        self.servers.iter().map(|server| server.channel)
    }

    /// The fetch lane that has a channel.
    pub(super) fn lane_of(&self, channel: ChannelId) -> Option<u8> {
        self.servers.iter().find(|server| server.channel == channel).map(|server| server.lane)
    }

    /// Whether a lane's present channel was dialed this often before.
    pub(super) fn is_at(&self, lane: u8, attempt: u64) -> bool {
        self.servers.iter().any(|server| (server.lane, server.attempt) == (lane, attempt))
    }

    fn get(&mut self, lane: u8) -> Option<&mut Server> {
        self.servers.iter_mut().find(|server| server.lane == lane && !server.ended)
    }
}

impl Process {
    /// Opens all fetch lanes, which are numbered after the data lanes.
    pub(super) fn open_fetch_lanes(
        &mut self,
        token: Token,
        attempts: &[u64],
        network: &mut Network,
    ) {
        self.fetch.channels().for_each(|channel| network.close(channel, Host::Source));
        self.fetch.servers.clear();
        self.fetch.opening = attempts.len();
        for (lane, &attempt) in (self.channels..).zip(attempts) {
            self.dial(Role::Data, lane, (token, attempt), std::time::Duration::ZERO, network);
        }
    }

    /// A fetch lane has a greeted channel.
    pub(super) fn join_fetch_lane(
        &mut self,
        (lane, attempt): (u8, u64),
        channel: ChannelId,
        network: &mut Network,
    ) -> Vec<Input> {
        if let Some(at) = self.fetch.servers.iter().position(|server| server.lane == lane) {
            network.close(self.fetch.servers.swap_remove(at).channel, Host::Source);
        }
        let (bytes, sequence) = (Vec::new(), 0);
        let (ended, ended_early) = (false, false);
        let server = Server { lane, attempt, channel, sequence, bytes, ended, ended_early };
        self.fetch.servers.push(server);
        match self.fetch.opening {
            0 => return vec![Input::LaneRejoined { lane, placed: 0 }],
            left => self.fetch.opening = left - 1,
        }
        if self.fetch.opening > 0 {
            return Vec::new();
        }
        let ended = self.fetch.servers.iter().filter(|server| server.ended_early);
        let lost: Vec<Input> = ended.map(|server| server.lost(ErrorKind::UnexpectedEof)).collect();
        std::iter::once(Input::FetchLanesJoined).chain(lost).collect()
    }

    /// An attempt to open a channel has failed. If a fetch lane has never had one, the migration
    /// can't go on.
    pub(super) fn not_dialed(&mut self, dial: &Dial, error: MigrateError) -> Input {
        let fetches = dial.role == Role::Data && dial.lane >= self.channels;
        if fetches && std::mem::take(&mut self.fetch.opening) > 0 {
            return Input::Failed(error);
        }
        dial.failed(error)
    }

    /// The channel of a fetch lane has ended.
    pub(super) fn fetch_lane_ended(&mut self, lane: u8) -> Option<Input> {
        let is_opening = self.fetch.opening > 0;
        let server = self.fetch.get(lane)?;
        server.ended = true;
        server.ended_early = is_opening;
        (!is_opening).then(|| server.lost(ErrorKind::UnexpectedEof))
    }

    /// Tells the destination which pages were not sent. They count as never sent.
    pub(super) fn tell_lacking(&mut self) -> Vec<ControlMessage> {
        let mut lacking = self.harvester.name_pending();
        if self.sabotage == Some(Sabotage::OmitLacking)
            && let Some(PageRun { slot, first, .. }) = self.harvester.pending().runs().next()
        {
            lacking.bitmap_mut(slot).clear_run(first, 1);
        }
        lacking.runs().for_each(|run| self.hashes.forget(run));
        lacking_messages(&lacking).collect()
    }

    /// Handles bytes on a fetch lane's channel: requests, each of which is answered with a frame.
    pub(super) fn heard_on_fetch_lane(
        &mut self,
        lane: u8,
        bytes: &[u8],
        network: &mut Network,
    ) -> Vec<Input> {
        let Some(server) = self.fetch.get(lane) else { return Vec::new() };
        server.bytes.extend_from_slice(bytes);
        let heard = std::mem::take(&mut server.bytes);
        let (requests, rest) = heard.as_chunks::<PAGE_REQUEST_BYTES>();
        server.bytes = rest.to_vec();
        for request in requests {
            if let Err(error) = self.answer(lane, request, network) {
                let Some(server) = self.fetch.get(lane) else { return Vec::new() };
                // Its thread has ended. The channel stays open until another one replaces it.
                server.ended = true;
                return vec![match error {
                    MigrateError::LinkLost { .. } => server.lost(ErrorKind::BrokenPipe),
                    error => Input::Failed(error),
                }];
            }
        }
        Vec::new()
    }

    fn answer(
        &mut self,
        lane: u8,
        request: &[u8; PAGE_REQUEST_BYTES],
        network: &mut Network,
    ) -> Result<(), MigrateError> {
        let refused = |reason: String| MigrateError::Protocol {
            channel: channel_name(Some(lane)),
            offset: 0,
            reason,
        };
        let request = PageRequest::parse(request).map_err(|error| refused(error.to_string()))?;
        let Some(round) = self.fetch.round else {
            return Err(refused("a request for a page before FINAL".into()));
        };
        self.encoder.check(request.run()).map_err(|error| refused(error.to_string()))?;
        let mut batch = PageBatch::of_run(round, request.run());
        batch.zero = self.harvester.freed().zero();
        if self.sabotage == Some(Sabotage::ServeZeros) {
            let mut zero = self.harvester.pending().clone();
            zero.clear_all();
            let PageRun { slot, first, .. } = request.run();
            zero.bitmap_mut(SlotId(slot.0)).set(first);
            batch.zero = Some(zero.into());
        }
        let choice = if lane < self.fetch.first_background {
            Choice::default()
        } else {
            let choice = CHOICES[network.rng.usize(..CHOICES.len())];
            Choice { delta: DeltaUse::Off, ..choice }
        };
        let mut frame = EncodedFrame::new();
        self.encoder.encode(lane, &batch, &mut frame, choice)?;
        let Some(server) = self.fetch.get(lane) else { return Ok(()) };
        server.sequence += 1;
        frame.set_sequence(server.sequence);
        let mut bytes = Vec::with_capacity(frame.wire_bytes());
        let broken = |error: &Error| lost(&channel_name(Some(lane)), "serving pages", error);
        frame.write_to(&mut bytes).map_err(|error| broken(&error))?;
        if !network.send(server.channel, Host::Destination, "page", bytes) {
            return Err(broken(&ErrorKind::BrokenPipe.into()));
        }
        Ok(())
    }
}

impl Server {
    fn lost(&self, why: ErrorKind) -> Input {
        let error = lost(&channel_name(Some(self.lane)), "serving pages", &why.into());
        Input::LaneLost { lane: self.lane, attempt: self.attempt, error }
    }
}
