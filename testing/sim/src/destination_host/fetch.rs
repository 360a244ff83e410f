//! The destination's fetch lanes with post-copy: requests for missing pages, and their answers.

use std::collections::{BTreeMap, VecDeque};
use std::io::Cursor;
use std::sync::Arc;

use vmferry::data::destination::place::FrameReader;
use vmferry::link::{channel_name, lost};
use vmferry::machine::destination::io::{Input, LinkId};
use vmferry::{MigrateError, chain};
use vmferry_codec::{CodecError, Decoder, Decompressors, Frame};
use vmferry_memory::{PageRun, PageSet, SlotId};
use vmferry_wire::{
    ControlMessage, FetchLanes as Announced, Hello, HelloStatus, LaneOffer, LaneToken, PageRequest,
    SessionWord, Token,
};

use super::session::Session;
use crate::guest::Guest;
use crate::host::Host;
use crate::network::{ChannelId, Network};
use crate::plan::Sabotage;

/// Pages of one background request, and those that are outstanding on a lane.
const REQUEST_PAGES: u64 = 4;
const WINDOW_PAGES: u64 = 8;

/// The fetch lanes of a session.
pub(super) struct FetchLanes {
    /// The number of the first lane.
    first: u8,
    announced: Announced,
    lanes: BTreeMap<u8, FetchLane>,
    /// The missing pages are known, and are requested when the guest touches them.
    fetches: bool,
    /// The guest runs, and all missing pages are requested.
    runs: bool,
}

/// A fetch lane with its channel.
struct FetchLane {
    channel: ChannelId,
    /// How often its channel was dialed before.
    attempt: u64,
    frames: FrameReader<Cursor<Vec<u8>>>,
    decoder: Decoder,
    /// Requests without an answer, in the order in which they were made.
    outstanding: VecDeque<PageRun>,
    /// The channel has ended.
    ended: bool,
}

impl FetchLanes {
    /// Lanes without channels, of which the first has this number.
    pub(super) fn new(first: u8, announced: Announced) -> Self {
        Self { first, announced, lanes: BTreeMap::new(), fetches: false, runs: false }
    }

    /// For a guest whose missing pages are known already. The source has offered no lanes yet.
    pub(super) fn of_left() -> Self {
        Self { fetches: true, ..Self::new(0, Announced { faults: 0, background: 0 }) }
    }

    /// Replaces all lanes by those that the source offers.
    fn renew(&mut self, offer: LaneOffer, guest: &Guest, network: &mut Network) {
        self.lanes.values_mut().for_each(|lane| lane.end(guest, network));
        self.lanes.clear();
        (self.first, self.announced) = (offer.first, offer.lanes);
    }

    /// Whether this is the number of a fetch lane.
    pub(super) fn has(&self, lane: u8) -> bool {
        lane >= self.first && lane - self.first < self.announced.count()
    }

    /// The fetch lane that has a channel.
    pub(super) fn lane_of(&self, channel: ChannelId) -> Option<u8> {
        self.lanes.iter().find(|(_, lane)| lane.channel == channel).map(|(number, _)| *number)
    }

    /// Uses a channel for a lane, unless it is not newer than the present one.
    pub(super) fn join(
        &mut self,
        channel: ChannelId,
        hello: &Hello,
        guest: &Guest,
        network: &mut Network,
    ) -> Result<u64, HelloStatus> {
        if let Some(old) = self.lanes.get_mut(&hello.lane) {
            if hello.attempt <= old.attempt {
                return Err(HelloStatus::BadLane);
            }
            old.end(guest, network);
        }
        let lane = FetchLane {
            channel,
            attempt: hello.attempt,
            frames: FrameReader::new(hello.lane, Cursor::default()),
            decoder: Decoder::new(Decompressors::default()),
            outstanding: VecDeque::new(),
            ended: false,
        };
        self.lanes.insert(hello.lane, lane);
        Ok(0)
    }

    /// A lane's channel is greeted. Pages that vCPUs wait for are requested again: the answers may
    /// have been lost with the previous channel.
    fn begin(&mut self, lane: u8, repeats: bool, guest: &Guest, network: &mut Network) {
        if lane >= self.first_background() {
            self.fill(lane, guest, network);
        } else if self.fetches && repeats {
            self.request(lane, &guest.awaited(), network);
        }
    }

    /// Closes all channels.
    pub(super) fn close(self, network: &mut Network) {
        for lane in self.lanes.into_values().filter(|lane| !lane.ended) {
            network.close(lane.channel, Host::Destination);
        }
    }

    fn first_background(&self) -> u8 {
        self.first + self.announced.faults
    }

    /// The lane for a fault in a slot: another one while that has no channel.
    fn lane_for(&self, slot: SlotId) -> Option<u8> {
        let lanes = self.lanes.range(..self.first_background());
        let open: Vec<u8> =
            lanes.filter(|(_, lane)| !lane.ended).map(|(number, _)| *number).collect();
        open.get(usize::from(slot.0) % open.len().max(1)).copied()
    }

    /// Requests pages that vCPUs wait for. Without a channel they are requested on the next one.
    fn request_faults(&mut self, runs: &[PageRun], network: &mut Network) {
        for run in runs {
            if let Some(lane) = self.lane_for(run.slot) {
                self.request(lane, &[*run], network);
            }
        }
    }

    /// Requests pages on a lane.
    fn request(&mut self, lane: u8, runs: &[PageRun], network: &mut Network) {
        let Some(lane) = self.lanes.get_mut(&lane).filter(|lane| !lane.ended) else { return };
        runs.iter().for_each(|run| lane.request(*run, network));
    }

    /// Requests background pages on a lane until its window is full.
    fn fill(&mut self, lane: u8, guest: &Guest, network: &mut Network) {
        let Some(lane) = self.lanes.get_mut(&lane).filter(|lane| self.runs && !lane.ended) else {
            return;
        };
        while lane.outstanding_pages() < WINDOW_PAGES
            && let Some(run) = guest.queue_next(REQUEST_PAGES)
        {
            lane.request(run, network);
        }
    }

    fn fill_all(&mut self, guest: &Guest, network: &mut Network) {
        for lane in self.first_background()..self.first + self.announced.count() {
            self.fill(lane, guest, network);
        }
    }

    /// Places an answer, or finds that the channel was cut within it.
    fn place(
        &mut self,
        number: u8,
        bytes: &[u8],
        session: &Memory<'_>,
        network: &mut Network,
    ) -> Result<bool, MigrateError> {
        let Some(lane) = self.lanes.get_mut(&number).filter(|lane| !lane.ended) else {
            return Ok(false);
        };
        lane.frames.get_mut().get_mut().extend_from_slice(bytes);
        let is_for_faults = number < self.first + self.announced.faults;
        let placed = lane.receive(number, session).and_then(|last| {
            let Some(run) = lane.outstanding.pop_front() else { return Ok(last) };
            // A page that the answer lacked is requested again.
            session.guest.unqueue(run);
            if is_for_faults && session.guest.lacks(run) {
                let (channel, offset) = (channel_name(Some(number)), lane.frames.offset());
                let reason = "the answer to a request lacks the page".into();
                return Err(MigrateError::Protocol { channel, offset, reason });
            }
            Ok(last)
        });
        if placed.is_err() {
            lane.end(session.guest, network);
        } else if !is_for_faults {
            self.fill(number, session.guest, network);
        }
        placed
    }
}

/// What the pages of a session are placed in.
struct Memory<'a> {
    guest: &'a Guest,
    memory: &'a vmferry_memory::GuestMemory,
    hashes: &'a vmferry_codec::PageHashes,
    sabotage: Option<Sabotage>,
}

impl FetchLane {
    fn outstanding_pages(&self) -> u64 {
        self.outstanding.iter().map(|run| run.pages).sum()
    }

    /// Sends a request. The end of a channel is noticed where it is read.
    fn request(&mut self, run: PageRun, network: &mut Network) {
        self.outstanding.push_back(run);
        if let Some(request) = PageRequest::new(run) {
            network.send(self.channel, Host::Source, "request", request.encode().to_vec());
        }
    }

    /// The channel has ended, and outstanding answers will not come.
    fn end(&mut self, guest: &Guest, network: &mut Network) {
        if !std::mem::replace(&mut self.ended, true) {
            network.close(self.channel, Host::Destination);
            self.outstanding.drain(..).for_each(|run| guest.unqueue(run));
        }
    }

    /// Reads a frame and places its missing pages.
    fn receive(&mut self, number: u8, session: &Memory<'_>) -> Result<bool, MigrateError> {
        let &Memory { guest, memory, hashes, sabotage } = session;
        let (mut frame, offset) = (Frame::new(), self.frames.offset());
        self.frames.receive(&mut frame)?;
        let decoded = self.decoder.decode(&frame, memory, hashes, |_| true);
        let decoded = decoded.map_err(|error| match error {
            CodecError::Memory(error) => error.into(),
            error => {
                let channel = channel_name(Some(number));
                MigrateError::Protocol { channel, offset, reason: chain(&error) }
            }
        })?;
        let Some(decoded) = decoded else { return Ok(false) };
        let late = sabotage == Some(Sabotage::PlaceLate);
        let left = guest.left();
        let mut last = false;
        for (run, content) in decoded.runs() {
            last |= guest.arrive(run, content, late);
        }
        decoded.record(hashes);
        if sabotage == Some(Sabotage::FetchedEarly) {
            last = left > 1 && guest.left() == 1;
        }
        Ok(last)
    }
}

impl Session {
    /// Frees pages that are outdated.
    pub(super) fn free_outdated(&self, runs: &[PageRun]) -> Result<(), MigrateError> {
        let Some((memory, hashes)) = &self.memory else { return Ok(()) };
        for &run in runs {
            memory.discard(run)?;
            hashes.forget(run);
        }
        Ok(())
    }

    /// Fetches all missing pages that are touched from now on.
    pub(super) fn fetch_missing(&mut self, missing: PageSet, network: &mut Network) {
        for lane in std::mem::take(&mut self.lanes).into_values() {
            network.close(lane.channel, Host::Destination);
        }
        if let Some(fetch) = &mut self.fetch {
            self.vm.guest().lack(missing);
            fetch.fetches = true;
        }
    }

    /// Expects the offered lanes instead of earlier ones, and tells the source their token.
    pub(super) fn use_offer(
        &mut self,
        link: LinkId,
        offer: LaneOffer,
        network: &mut Network,
    ) -> Option<Input> {
        let session = self.machine.session()?;
        let token = Token(network.rng.u128(..).to_le_bytes());
        self.fetch.as_mut()?.renew(offer, self.vm.guest(), network);
        self.token = token;
        let word = SessionWord::Fetching;
        let token = Some(LaneToken { token, streams: None });
        let message = ControlMessage::Answer { session, word, token };
        self.send(link, &message, network)
    }

    /// The guest runs: all missing pages are fetched. Returns whether none is missing.
    pub(super) fn begin_background(&mut self, network: &mut Network) -> bool {
        let guest = self.vm.guest();
        let Some(fetch) = self.fetch.as_mut().filter(|fetch| fetch.fetches) else { return false };
        fetch.runs = true;
        fetch.fill_all(guest, network);
        guest.left() == 0
    }

    /// The channel of a lane is greeted.
    pub(super) fn begin_lane(&mut self, lane: u8, network: &mut Network) {
        let repeats = self.repeats();
        if let Some(fetch) = self.fetch.as_mut().filter(|fetch| fetch.has(lane)) {
            fetch.begin(lane, repeats, self.vm.guest(), network);
        }
    }

    /// Whether requests are repeated whose answers were lost.
    fn repeats(&self) -> bool {
        self.sabotage != Some(Sabotage::ForgetRequests)
    }

    /// Requests the pages that the guest has touched.
    pub(super) fn request_faults(&mut self, network: &mut Network) {
        if let Some(fetch) = self.fetch.as_mut().filter(|fetch| fetch.fetches) {
            fetch.request_faults(&self.vm.guest().take_faults(), network);
        }
    }

    /// The fetch lane that has a channel.
    pub(super) fn fetch_lane_of(&self, channel: ChannelId) -> Option<u8> {
        self.fetch.as_ref()?.lane_of(channel)
    }

    /// Handles bytes on a fetch lane's channel.
    pub(super) fn heard_on_fetch_lane(
        &mut self,
        number: u8,
        bytes: &[u8],
        network: &mut Network,
    ) -> Option<Input> {
        let (Some(fetch), Some((memory, hashes))) = (&mut self.fetch, &self.memory) else {
            return None;
        };
        let attempt = fetch.lanes.get(&number)?.attempt;
        let (guest, hashes) = (self.vm.guest(), Arc::as_ref(hashes));
        let session = Memory { guest, memory, hashes, sabotage: self.sabotage };
        match fetch.place(number, bytes, &session, network) {
            Ok(last) => last.then_some(Input::Fetched),
            Err(error @ MigrateError::LinkLost { .. }) => {
                self.take_over(network);
                Some(Input::LaneLost { lane: number, attempt, error })
            }
            Err(error) => Some(Input::Failed(error)),
        }
    }

    /// A fetch lane's channel is gone.
    pub(super) fn fetch_lane_lost(&mut self, number: u8, network: &mut Network) -> Option<Input> {
        let (guest, repeats) = (self.vm.guest(), self.repeats());
        let lane = self.fetch.as_mut()?.lanes.get_mut(&number)?;
        if lane.ended {
            return None;
        }
        if !repeats {
            lane.outstanding.clear();
        }
        lane.end(guest, network);
        let attempt = lane.attempt;
        self.take_over(network);
        let end = std::io::ErrorKind::UnexpectedEof.into();
        let error = lost(&channel_name(Some(number)), "fetching pages", &end);
        Some(Input::LaneLost { lane: number, attempt, error })
    }

    /// The other lanes take over what was requested on a lost one.
    fn take_over(&mut self, network: &mut Network) {
        let (guest, repeats) = (self.vm.guest(), self.repeats());
        if let Some(fetch) = self.fetch.as_mut().filter(|fetch| fetch.fetches) {
            if repeats {
                fetch.request_faults(&guest.awaited(), network);
            }
            fetch.fill_all(guest, network);
        }
    }
}
