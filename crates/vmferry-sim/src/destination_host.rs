//! The destination: its disk, and a process that listens and drives the engine's machine.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use vmferry::destination::io::{Action, Ending, Input, LinkId};
use vmferry::destination::machine::Destination;
use vmferry::destination::place::{FrameReader, LaneProgress, PlacedCounters, Placer};
use vmferry::handover::DestinationState;
use vmferry::journal::{Journal, Record, recover_destination};
use vmferry::link::{ControlReader, lost};
use vmferry::{DestinationVm, MigrateError, Timeouts};
use vmferry_codec::{Decompressors, Frame, PageHashes};
use vmferry_memory::{GuestMemory, whole_hash};
use vmferry_wire::{
    ControlMessage, HELLO_BYTES, Hello, HelloReply, HelloStatus, PROTOCOL_VERSION_MAX,
    PROTOCOL_VERSION_MIN, Reason, ReasonCode, Role, SessionId, SessionWord, Token,
};

use crate::disk::{Disk, SimJournal};
use crate::guest::{Guest, Vm};
use crate::network::{ChannelId, Event, Network};
use crate::plan::Host;
use crate::source_host::brief;

/// How long a lost data channel may wait for the control channel to say why.
const EXPLANATION: Duration = Duration::from_millis(500);

/// The destination's host.
pub struct DestinationHost {
    /// The guest, which dies with the process.
    pub guest: Guest,
    disk: Disk,
    session_number: SessionId,
    /// The process listens.
    listens: bool,
    session: Option<Session>,
    /// Query channels on which nothing was asked yet, or whose answer is on its way.
    queries: Vec<ChannelId>,
    /// Counts the processes and sessions.
    number: u64,
    timeouts: Timeouts,
}

struct Session {
    machine: Destination,
    vm: Vm,
    token: Token,
    links: BTreeMap<LinkId, ChannelId>,
    journal: Option<SimJournal>,
    memory: Option<(GuestMemory, Arc<PageHashes>)>,
    expected_lanes: u8,
    lanes: BTreeMap<ChannelId, Lane>,
}

struct Lane {
    number: u8,
    frames: FrameReader<VecDeque<u8>>,
    placer: Placer,
    progress: LaneProgress,
}

impl DestinationHost {
    /// A host whose process has just greeted a control channel.
    pub fn new(
        guest: Guest,
        disk: Disk,
        session_number: SessionId,
        timeouts: Timeouts,
        control: ChannelId,
        network: &mut Network,
    ) -> Self {
        let token = Token(network.rng.u128(..).to_le_bytes());
        let session = Session {
            machine: Destination::new(timeouts, token, network.now()),
            vm: guest.attach(),
            token,
            links: BTreeMap::from([(LinkId::CONTROL, control)]),
            journal: None,
            memory: None,
            expected_lanes: 0,
            lanes: BTreeMap::new(),
        };
        Self {
            guest,
            disk,
            session_number,
            listens: true,
            session: Some(session),
            queries: Vec::new(),
            number: 0,
            timeouts,
        }
    }

    /// Whether a process listens.
    pub fn listens(&self) -> bool {
        self.listens
    }

    /// Whether a session is not done.
    pub fn is_busy(&self) -> bool {
        self.session.is_some()
    }

    /// When the machine wants to be told the time.
    pub fn next_tick(&self) -> Option<Duration> {
        self.session.as_ref().and_then(|session| session.machine.next_tick())
    }

    /// What the migration is doing.
    pub fn phase(&self) -> &'static str {
        self.session.as_ref().map_or("nothing", |session| session.machine.phase_name())
    }

    /// The word of this host's journal, as a process that starts now would read it.
    pub fn recovered(&self) -> Option<DestinationState> {
        recover_destination(&self.disk.records(self.session_number))
    }

    /// The process dies, and with it the guest.
    pub fn crash(&mut self, network: &mut Network) {
        self.listens = false;
        self.number += 1;
        self.guest.detach(true);
        if let Some(session) = self.session.take() {
            session.close(network);
        }
        for query in std::mem::take(&mut self.queries) {
            network.close(query, Host::Destination);
        }
    }

    /// A process is started again.
    pub fn restart(&mut self, network: &mut Network) {
        let records = self.disk.records(self.session_number);
        network.note(|| format!("destination: restarts with {records:?}"));
        self.listens = true;
    }

    /// Something happened.
    pub fn input(&mut self, number: u64, input: Input, network: &mut Network) {
        if number == self.number
            && let Some(session) = &mut self.session
        {
            session.machine.handle(network.now(), input);
            self.pump(network);
        }
    }

    /// Time has passed, or the user wants something.
    pub fn tell(&mut self, input: Input, network: &mut Network) {
        self.input(self.number, input, network);
    }

    /// Bytes have arrived.
    pub fn deliver(&mut self, channel: ChannelId, bytes: &[u8], network: &mut Network) {
        if let Some(session) = &mut self.session {
            if session.lanes.contains_key(&channel) {
                for input in session.place(channel, bytes, network) {
                    self.tell(input, network);
                }
                return;
            }
            let link = session.links.iter().find(|(_, at)| **at == channel).map(|(link, _)| *link);
            if let Some(link) = link {
                return self.heard(link, bytes, network);
            }
        }
        if let Some(at) = self.queries.iter().position(|query| *query == channel) {
            self.queries.swap_remove(at);
            return self.asked(channel, bytes, network);
        }
        self.greet(channel, bytes, network);
    }

    fn heard(&mut self, link: LinkId, bytes: &[u8], network: &mut Network) {
        let input = match ControlReader::new(bytes).receive("waiting for the source") {
            Ok(message) => Input::Control { link, message },
            // A query channel that ends, or speaks nonsense, has been answered.
            Err(_) if link != LinkId::CONTROL => return,
            Err(error @ MigrateError::Protocol { .. }) => Input::Failed(error),
            Err(error) => Input::LinkLost(error),
        };
        self.tell(input, network);
    }

    /// A channel that is new says what it is for.
    fn greet(&mut self, channel: ChannelId, bytes: &[u8], network: &mut Network) {
        let hello = <&[u8; HELLO_BYTES]>::try_from(bytes).ok().and_then(|b| Hello::parse(b).ok());
        let Some(hello) = hello else { return network.close(channel, Host::Destination) };
        let status = match hello.role {
            Role::Query => {
                self.queries.push(channel);
                HelloStatus::Ok
            }
            Role::Data => self
                .session
                .as_mut()
                .map_or(HelloStatus::BadToken, |session| session.join(channel, &hello)),
            _ => HelloStatus::Busy,
        };
        let (version_min, version_max) = (PROTOCOL_VERSION_MIN, PROTOCOL_VERSION_MAX);
        let reply =
            HelloReply { status, version_min, version_max, version: version_max, placed: 0 };
        network.send(channel, Host::Source, "greeting", reply.encode().to_vec());
        if status != HelloStatus::Ok {
            network.close(channel, Host::Destination);
        }
    }

    /// A source in doubt asks.
    fn asked(&mut self, channel: ChannelId, bytes: &[u8], network: &mut Network) {
        let asked = ControlReader::new(bytes).receive("a question about a session");
        let Ok(ControlMessage::Query { session }) = asked else {
            return network.close(channel, Host::Destination);
        };
        if let Some(live) = &mut self.session
            && live.machine.session() == Some(session)
        {
            let link = LinkId(live.links.keys().map(|link| link.0).max().unwrap_or(0) + 1);
            live.links.insert(link, channel);
            let message = ControlMessage::Query { session };
            return self.tell(Input::Control { link, message }, network);
        }
        if let Some(word) = self.recovered_word(session, network) {
            network.note(|| format!("destination: its journal says {word:?}"));
            send(network, channel, &ControlMessage::Answer { session, word });
        }
        network.close(channel, Host::Destination);
    }

    /// As `vmferry::journal::recovered_word` does with files.
    fn recovered_word(&mut self, session: SessionId, network: &mut Network) -> Option<SessionWord> {
        let (mut journal, records) = match self.disk.reopen(session) {
            Ok(Some(found)) => found,
            Ok(None) => return Some(SessionWord::Unknown),
            Err(error) => panic!("the simulated disk never damages a whole line: {error}"),
        };
        match recover_destination(&records) {
            None => Some(SessionWord::Unknown),
            Some(DestinationState::AbortWriting) => {
                let reason = "the destination was restarted".to_owned();
                let written = journal.append(&Record::Aborted { reason });
                if self.disk.takes_the_process_along() {
                    self.crash(network);
                    network.after(Duration::from_secs(3), Event::Restart(Host::Destination));
                }
                written.is_ok().then_some(SessionWord::Aborted)
            }
            Some(state) => Some(state.word()),
        }
    }

    /// A channel has ended.
    pub fn closed(&mut self, channel: ChannelId, network: &mut Network) {
        self.queries.retain(|query| *query != channel);
        let Some(session) = &mut self.session else { return };
        let end = |name: &str| {
            lost(name, "waiting for the source", &std::io::ErrorKind::UnexpectedEof.into())
        };
        if let Some(lane) = session.lanes.get(&channel) {
            let error = end(&format!("lane {}", lane.number));
            let event = Event::Destination(self.number, Input::LinkLost(error));
            network.after(EXPLANATION, event);
        } else if session.links.get(&LinkId::CONTROL) == Some(&channel) {
            session.links.remove(&LinkId::CONTROL);
            self.tell(Input::LinkLost(end("control")), network);
        } else {
            session.links.retain(|_, at| *at != channel);
        }
    }

    /// Carries out what the machine wants, to the session's end.
    pub fn pump(&mut self, network: &mut Network) {
        loop {
            let Some(session) = &mut self.session else { return };
            let Some(action) = session.machine.next_action() else { break };
            network.note(|| format!("destination: {}", brief(&format!("{action:?}"))));
            let input = session.execute(action, self.number, &self.disk, network);
            if self.disk.takes_the_process_along() {
                network.note(|| "destination: dies with its write".into());
                self.crash(network);
                network.after(Duration::from_secs(3), Event::Restart(Host::Destination));
                return;
            }
            if let (Some(input), Some(session)) = (input, &mut self.session) {
                session.machine.handle(network.now(), input);
            }
        }
        let Some(session) = &mut self.session else { return };
        if let Some(ending) = session.machine.ending() {
            network.note(|| format!("destination: ended {ending:?}"));
            let stuck = matches!(ending, Ending::Stuck(_));
            if let Some(session) = self.session.take() {
                session.close(network);
            }
            self.number += 1;
            if stuck {
                // `receive` ends then, and its operator starts it again.
                self.crash(network);
                network.after(self.timeouts.commit, Event::Restart(Host::Destination));
            }
        }
    }
}

impl Session {
    fn close(self, network: &mut Network) {
        for channel in self.lanes.keys().chain(self.links.values()) {
            network.close(*channel, Host::Destination);
        }
    }

    fn join(&mut self, channel: ChannelId, hello: &Hello) -> HelloStatus {
        let Some((memory, hashes)) = &self.memory else { return HelloStatus::BadToken };
        if hello.token != self.token || !self.links.contains_key(&LinkId::CONTROL) {
            return HelloStatus::BadToken;
        }
        let taken = self.lanes.values().any(|lane| lane.number == hello.lane);
        if hello.lane >= self.expected_lanes || taken {
            return HelloStatus::BadLane;
        }
        let lane = Lane {
            number: hello.lane,
            frames: FrameReader::new(hello.lane, VecDeque::new()),
            placer: Placer::new(
                self.expected_lanes,
                memory.clone(),
                Arc::clone(hashes),
                Arc::<PlacedCounters>::default(),
                Decompressors::default(),
            ),
            progress: LaneProgress::default(),
        };
        self.lanes.insert(channel, lane);
        HelloStatus::Ok
    }

    /// A frame, or a part of one that was cut off.
    fn place(&mut self, channel: ChannelId, bytes: &[u8], network: &mut Network) -> Vec<Input> {
        let control = self.links.get(&LinkId::CONTROL).copied();
        let Some(lane) = self.lanes.get_mut(&channel) else { return Vec::new() };
        lane.frames.get_mut().extend(bytes);
        let offset = lane.frames.offset();
        let mut frame = Frame::new();
        let placed = lane.frames.receive(&mut frame).and_then(|header| {
            lane.placer.place(lane.number, &frame, offset)?;
            Ok(lane.progress.finished(&header))
        });
        let lane = lane.number;
        match placed {
            Ok(placed) => {
                if let (Some(sequence), Some(control)) = (placed.acknowledge, control) {
                    send(network, control, &ControlMessage::Placed { lane, sequence });
                }
                placed
                    .ended
                    .map(|sequence| Input::LaneEnded { lane, sequence })
                    .into_iter()
                    .collect()
            }
            Err(error) => {
                self.lanes.remove(&channel);
                vec![match error {
                    error @ MigrateError::LinkLost { .. } => Input::LinkLost(error),
                    error => Input::Failed(error),
                }]
            }
        }
    }

    fn execute(
        &mut self,
        action: Action,
        number: u64,
        disk: &Disk,
        network: &mut Network,
    ) -> Option<Input> {
        match action {
            Action::Send { link, message } => self.send(link, &message, network),
            Action::Broadcast(message) => {
                let links: Vec<LinkId> = self.links.keys().copied().collect();
                links.into_iter().filter_map(|link| self.send(link, &message, network)).next()
            }
            Action::Prepare(guest) => Some(Input::Prepared(
                self.vm
                    .prepare(&guest)
                    .map(|memory| {
                        let hashes = Arc::new(PageHashes::for_memory(&memory));
                        self.memory = Some((memory, hashes));
                    })
                    .map_err(|error| MigrateError::Refused {
                        peer: "destination",
                        reason: Reason::new(ReasonCode::VmRefused, &error.to_string()),
                    }),
            )),
            Action::Open(session) => Some(Input::Opened(self.open(session, disk))),
            Action::ExpectLanes { lanes } => {
                self.expected_lanes = lanes;
                None
            }
            Action::SumDigest => {
                Some(Input::Digest(self.memory.as_ref().map_or(0, |(_, hashes)| hashes.sum())))
            }
            Action::Load(state) => Some(Input::Loaded(
                self.vm
                    .load(&state)
                    .map(|()| Duration::from_micros(100))
                    .map_err(|source| MigrateError::Vm { action: "load the state", source }),
            )),
            Action::Hash => {
                let (memory, _) = self.memory.as_ref()?;
                let takes = Duration::from_millis(network.rng.u64(1..2_000));
                let input = whole_hash(memory).map_or_else(
                    |error| Input::Failed(error.into()),
                    |hash| Input::Hashed(hash, takes),
                );
                network.after(takes, Event::Destination(number, input));
                None
            }
            Action::WriteIntent => Some(Input::IntentWritten(self.write(&Record::RunIntent))),
            Action::WriteAborted { reason } => {
                Some(Input::AbortWritten(self.write(&Record::Aborted { reason })))
            }
            Action::Run => Some(Input::Started(
                self.vm
                    .run()
                    .map_err(|source| MigrateError::Vm { action: "start the guest", source }),
            )),
            Action::Discard => {
                for channel in std::mem::take(&mut self.lanes).into_keys() {
                    network.close(channel, Host::Destination);
                }
                self.memory = None;
                self.vm.discard();
                None
            }
            Action::Report(_) => None,
        }
    }

    fn send(
        &mut self,
        link: LinkId,
        message: &ControlMessage,
        network: &mut Network,
    ) -> Option<Input> {
        let channel = *self.links.get(&link)?;
        if send(network, channel, message) {
            return None;
        }
        self.links.remove(&link);
        let broken = std::io::ErrorKind::BrokenPipe.into();
        (link == LinkId::CONTROL && !self.machine.handover().is_final())
            .then(|| Input::LinkLost(lost("control", "sending", &broken)))
    }

    fn open(&mut self, session: SessionId, disk: &Disk) -> Result<(), MigrateError> {
        let opened = disk.create(session).and_then(|mut journal| {
            let guest = vmferry_wire::GuestIdentity {
                uuid: uuid::Uuid::from_u128(9),
                name: "simulated".into(),
            };
            let peer = "source".to_owned();
            journal.append(&Record::Open { guest, peer, peer_names: Vec::new(), at: 0 })?;
            Ok(journal)
        });
        match opened {
            Ok(journal) => {
                self.journal = Some(journal);
                Ok(())
            }
            Err(error) => {
                self.memory = None;
                self.vm.discard();
                Err(error.into())
            }
        }
    }

    fn write(&mut self, record: &Record) -> Result<(), MigrateError> {
        match &mut self.journal {
            Some(journal) => Ok(journal.append(record)?),
            None => Err(MigrateError::Local {
                action: "write a journal that was never opened",
                source: std::io::ErrorKind::NotFound.into(),
            }),
        }
    }
}

fn send(network: &mut Network, channel: ChannelId, message: &ControlMessage) -> bool {
    let mut bytes = Vec::new();
    message.encode(&mut bytes);
    network.send(channel, Host::Source, message.name(), bytes)
}
