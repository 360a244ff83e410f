//! The driver of one session at the destination: carries the machine's actions out with a VMM,
//! threads and channels.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use vmferry_codec::PageHashes;
use vmferry_memory::{GuestMemory, whole_hash};
use vmferry_transport::{ChannelCloser, ChannelReader, ChannelWriter, PeerIdentity};
use vmferry_wire::{
    ControlMessage, GuestIdentity, HelloStatus, Reason, ReasonCode, SessionId, Token,
};

use super::arrivals::{Arrival, Connection, give_word, reply, turn_away};
use super::io::{Action, Ending, Input, LinkId};
use super::lanes::{Lane, LaneContext, PlacedCounters};
use super::machine::Destination;
use super::receive::Notice;
use crate::config::DestinationConfig;
use crate::cpu::CpuMeter;
use crate::error::MigrateError;
use crate::journal::{FileJournal, Journal, Record, Side, now_seconds};
use crate::link::{ControlReader, ControlWriter};
use crate::stats::DestinationStats;
use crate::vm::{DestinationVm, GuestDescription, PrepareError};

/// How long a lost data channel may wait for the control channel to say why.
const EXPLANATION: Duration = Duration::from_millis(500);

struct Link {
    writer: Arc<ControlWriter<ChannelWriter>>,
    closer: ChannelCloser,
}

/// How a session ended, with what is known of it.
pub struct Ended {
    /// How.
    pub ending: Ending,
    /// The session, if it was announced.
    pub session: Option<SessionId>,
    /// The guest, if it was announced.
    pub guest: Option<GuestIdentity>,
    /// The figures.
    pub stats: DestinationStats,
}

/// One session at work.
pub struct Session<'a, V> {
    vm: &'a mut V,
    config: &'a DestinationConfig,
    arrivals: &'a Receiver<Arrival>,
    stop: &'a Receiver<()>,
    machine: Destination,
    token: Token,
    started: Instant,
    peer: PeerIdentity,
    inputs: (Sender<Input>, Receiver<Input>),
    links: BTreeMap<LinkId, Link>,
    next_link: u64,
    journal: Option<FileJournal>,
    guest: Option<GuestIdentity>,
    memory: Option<(GuestMemory, Arc<PageHashes>)>,
    expected_lanes: u8,
    lanes: BTreeMap<u8, Lane>,
    lane_loss: Option<(Instant, MigrateError)>,
    placed: Arc<PlacedCounters>,
    cpu: CpuMeter,
    stopping: bool,
}

impl<'a, V: DestinationVm> Session<'a, V> {
    /// A session on a connection whose greeting is not yet answered.
    ///
    /// # Errors
    /// If the answer can't be sent, or the system has no random numbers or threads.
    pub fn begin(
        vm: &'a mut V,
        config: &'a DestinationConfig,
        arrivals: &'a Receiver<Arrival>,
        stop: &'a Receiver<()>,
        mut connection: Connection,
    ) -> Result<Self, MigrateError> {
        let token = random_token()?;
        reply(&mut connection, HelloStatus::Ok)?;
        let mut session = Self {
            vm,
            config,
            arrivals,
            stop,
            machine: Destination::new(config.timeouts, token, Duration::ZERO),
            token,
            started: Instant::now(),
            peer: connection.peer.clone(),
            inputs: crossbeam_channel::unbounded(),
            links: BTreeMap::new(),
            next_link: LinkId::CONTROL.0,
            journal: None,
            guest: None,
            memory: None,
            expected_lanes: 0,
            lanes: BTreeMap::new(),
            lane_loss: None,
            placed: Arc::default(),
            cpu: CpuMeter::default(),
            stopping: false,
        };
        session.add_link(connection)?;
        Ok(session)
    }

    /// Drives the session to its end.
    pub fn run(mut self, watch: &mut dyn FnMut(&Notice)) -> Ended {
        let guard = self.cpu.count_this_thread();
        let ending = loop {
            while let Some(action) = self.machine.next_action() {
                if let Action::Report(report) = &action {
                    watch(&Notice::Session(report.clone()));
                }
                if let Some(input) = self.execute(action) {
                    self.machine.handle(self.started.elapsed(), input);
                }
            }
            if let Some(ending) = self.machine.ending() {
                break ending;
            }
            let input = self.await_input(watch);
            self.machine.handle(self.started.elapsed(), input);
        };
        self.close();
        drop(guard);
        let mut stats = self.machine.stats().clone();
        let placed = &self.placed;
        stats.frames = placed.frames.load(Ordering::Relaxed);
        stats.content_pages = placed.content_pages.load(Ordering::Relaxed);
        stats.zero_pages = placed.zero_pages.load(Ordering::Relaxed);
        stats.received_bytes = placed.bytes.load(Ordering::Relaxed);
        stats.engine_cpu_s = self.cpu.seconds();
        Ended { ending, session: self.machine.session(), guest: self.guest.take(), stats }
    }

    fn await_input(&mut self, watch: &mut dyn FnMut(&Notice)) -> Input {
        let now = Instant::now();
        if let Some((lost_at, _)) = &self.lane_loss
            && now >= *lost_at + EXPLANATION
            && let Some((_, error)) = self.lane_loss.take()
        {
            return Input::LinkLost(error);
        }
        let tick = self.machine.next_tick().map(|at| self.started + at);
        let explained = self.lane_loss.as_ref().map(|(lost_at, _)| *lost_at + EXPLANATION);
        let wake = [tick, explained].into_iter().flatten().min();
        let wait = wake.map_or(Duration::from_secs(1), |at| at.saturating_duration_since(now));
        crossbeam_channel::select! {
            recv(self.inputs.1) -> input => match input {
                Ok(Input::LaneLost(error)) => {
                    self.lane_loss.get_or_insert((now, error));
                    Input::Tick
                }
                Ok(input) => input,
                Err(_) => Input::Tick,
            },
            recv(self.arrivals) -> arrival => match arrival {
                Ok(arrival) => self.on_arrival(arrival, watch),
                Err(_) => Input::Tick,
            },
            recv(if self.stopping { &NEVER } else { self.stop }) -> _ => {
                self.stopping = true;
                Input::Cancel
            }
            default(wait) => Input::Tick,
        }
    }

    fn on_arrival(&mut self, arrival: Arrival, watch: &mut dyn FnMut(&Notice)) -> Input {
        match arrival {
            Arrival::Control(connection) => {
                watch(&Notice::TurnedAway {
                    peer: connection.peer.address.clone(),
                    reason: "it wants to migrate a guest, and a migration is going on".into(),
                });
                turn_away(connection, HelloStatus::Busy);
            }
            Arrival::Data { lane, token, connection } => {
                return self.join_lane(lane, token, connection).unwrap_or_else(Input::Failed);
            }
            Arrival::Query { session, connection } if self.machine.session() == Some(session) => {
                match self.add_link(connection) {
                    Ok(link) => {
                        return Input::Control { link, message: ControlMessage::Query { session } };
                    }
                    Err(error) => watch(&Notice::turned_away("a question", &error)),
                }
            }
            Arrival::Query { session, connection } => {
                let peer = connection.peer.address.clone();
                if let Err(error) = give_word(&self.config.journal_directory, session, connection) {
                    watch(&Notice::turned_away(&peer, &error));
                }
            }
            Arrival::TurnedAway { peer, error } => watch(&Notice::turned_away(&peer, &error)),
        }
        Input::Tick
    }

    fn join_lane(
        &mut self,
        lane: u8,
        token: Token,
        mut connection: Connection,
    ) -> Result<Input, MigrateError> {
        let (Some((memory, hashes)), Some(control)) =
            (&self.memory, self.links.get(&LinkId::CONTROL))
        else {
            turn_away(connection, HelloStatus::BadToken);
            return Ok(Input::Tick);
        };
        if token != self.token {
            turn_away(connection, HelloStatus::BadToken);
            return Ok(Input::Tick);
        }
        if lane >= self.expected_lanes || self.lanes.contains_key(&lane) {
            turn_away(connection, HelloStatus::BadLane);
            return Ok(Input::Tick);
        }
        reply(&mut connection, HelloStatus::Ok)?;
        // A source that thinks sends nothing; the control channel tells whether it lives.
        connection.reader.set_timeout(None)?;
        let context = LaneContext {
            memory: memory.clone(),
            hashes: Arc::clone(hashes),
            control: Arc::clone(&control.writer),
            results: self.inputs.0.clone(),
            cpu: self.cpu.clone(),
            placed: Arc::clone(&self.placed),
            lanes: self.expected_lanes,
        };
        let Connection { reader, writer, closer, .. } = connection;
        let started = Lane::start(lane, &context, reader, writer, closer)
            .map_err(|source| MigrateError::Local { action: "start a thread", source })?;
        self.lanes.insert(lane, started);
        Ok(Input::Tick)
    }

    /// Listens to a control or query channel.
    fn add_link(&mut self, connection: Connection) -> Result<LinkId, MigrateError> {
        let link = LinkId(self.next_link);
        self.next_link += 1;
        let Connection { mut reader, writer, closer, .. } = connection;
        reader.set_timeout(None)?;
        let (inputs, cpu) = (self.inputs.0.clone(), self.cpu.clone());
        std::thread::Builder::new()
            .name("control-read".into())
            .spawn(move || {
                let _cpu = cpu.count_this_thread();
                read_link(reader, link, &inputs);
            })
            .map_err(|source| MigrateError::Local { action: "start a thread", source })?;
        self.links.insert(link, Link { writer: Arc::new(ControlWriter::new(writer)), closer });
        Ok(link)
    }

    fn execute(&mut self, action: Action) -> Option<Input> {
        match action {
            Action::Send { link, message } => self.send(link, &message),
            Action::Broadcast(message) => {
                let links: Vec<LinkId> = self.links.keys().copied().collect();
                links.into_iter().filter_map(|link| self.send(link, &message)).next()
            }
            Action::Prepare(guest) => Some(Input::Prepared(self.prepare(&guest))),
            Action::Open(session) => Some(Input::Opened(self.open(session))),
            Action::ExpectLanes { lanes } => {
                self.expected_lanes = lanes;
                None
            }
            Action::SumDigest => {
                let digest = self.memory.as_ref().map_or(0, |(_, hashes)| hashes.sum());
                Some(Input::Digest(digest))
            }
            Action::Load(state) => {
                let begun = Instant::now();
                let loaded = self.vm.load(&state).map(|()| begun.elapsed());
                Some(Input::Loaded(loaded.map_err(|source| MigrateError::Vm {
                    action: "load the guest's state",
                    source,
                })))
            }
            Action::Hash => self.hash(),
            Action::WriteIntent => Some(Input::IntentWritten(self.write(&Record::RunIntent))),
            Action::WriteAborted { reason } => {
                Some(Input::AbortWritten(self.write(&Record::Aborted { reason })))
            }
            Action::Run => {
                let started = self.vm.run();
                Some(Input::Started(
                    started
                        .map_err(|source| MigrateError::Vm { action: "start the guest", source }),
                ))
            }
            Action::Discard => {
                self.end_lanes();
                self.memory = None;
                self.vm.discard();
                None
            }
            Action::Report(_) => None,
        }
    }

    /// A message that can't be sent on the control channel is a lost link; on a query channel it
    /// is the asker's loss, and it asks again.
    fn send(&mut self, id: LinkId, message: &ControlMessage) -> Option<Input> {
        let link = self.links.get(&id)?;
        let error = link.writer.send(message).err()?;
        link.closer.close();
        self.links.remove(&id);
        (id == LinkId::CONTROL && !self.machine.handover().is_final())
            .then(|| Input::LinkLost(crate::link::lost("control", "sending", &error)))
    }

    fn prepare(&mut self, guest: &GuestDescription) -> Result<(), MigrateError> {
        self.guest = Some(guest.identity.clone());
        let memory = self.vm.prepare(guest).map_err(refusal)?;
        if memory.layout() != guest.layout {
            self.vm.discard();
            let text = "the destination VMM made other memory slots than those announced";
            return Err(refused(ReasonCode::LayoutMismatch, text));
        }
        let hashes = Arc::new(PageHashes::for_memory(&memory));
        self.memory = Some((memory, hashes));
        Ok(())
    }

    fn open(&mut self, session: SessionId) -> Result<(), MigrateError> {
        let opened = self.open_journal(session);
        if opened.is_err() {
            self.memory = None;
            self.vm.discard();
        }
        opened
    }

    fn open_journal(&mut self, session: SessionId) -> Result<(), MigrateError> {
        let directory = &self.config.journal_directory;
        let mut journal = FileJournal::create(directory, session, Side::Destination)?;
        if let Some(guest) = &self.guest {
            journal.append(&Record::Open {
                guest: guest.clone(),
                peer: self.peer.address.clone(),
                peer_names: self.peer.names.clone(),
                at: now_seconds(),
            })?;
        }
        self.journal = Some(journal);
        Ok(())
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

    fn hash(&mut self) -> Option<Input> {
        let (memory, _) = self.memory.as_ref()?;
        let (memory, results) = (memory.clone(), self.inputs.0.clone());
        let spawned = std::thread::Builder::new().name("verify".into()).spawn(move || {
            let begun = Instant::now();
            let _ = results.send(whole_hash(&memory).map_or_else(
                |error| Input::Failed(error.into()),
                |hash| Input::Hashed(hash, begun.elapsed()),
            ));
        });
        spawned
            .err()
            .map(|source| Input::Failed(MigrateError::Local { action: "start a thread", source }))
    }

    fn end_lanes(&mut self) {
        for (_, lane) in std::mem::take(&mut self.lanes) {
            lane.end();
        }
    }

    /// Lets the last words reach the source, then closes everything.
    fn close(&mut self) {
        self.end_lanes();
        for link in self.links.values() {
            let _ = link.writer.finish();
        }
        // The source closes its side once it has heard; its silence bounds the wait.
        let deadline = Instant::now() + LAST_WORDS;
        let mut open = !self.links.is_empty();
        while open {
            match self.inputs.1.recv_deadline(deadline) {
                Ok(Input::LinkLost(_)) | Err(_) => open = false,
                Ok(_) => {}
            }
        }
        for link in self.links.values() {
            link.closer.close();
        }
    }
}

/// How long a finished session waits for the source to hear its last message and hang up.
const LAST_WORDS: Duration = Duration::from_secs(1);

static NEVER: std::sync::LazyLock<Receiver<()>> =
    std::sync::LazyLock::new(crossbeam_channel::never);

fn read_link(reader: ChannelReader, link: LinkId, inputs: &Sender<Input>) {
    let mut reader = ControlReader::new(reader);
    loop {
        let input = match reader.receive("waiting for the source") {
            Ok(message) => Input::Control { link, message },
            Err(error) => {
                // A query channel that ends has been answered.
                if link == LinkId::CONTROL {
                    let _ = inputs.send(match error {
                        error @ MigrateError::Protocol { .. } => Input::Failed(error),
                        error => Input::LinkLost(error),
                    });
                }
                return;
            }
        };
        if inputs.send(input).is_err() {
            return;
        }
    }
}

fn random_token() -> Result<Token, MigrateError> {
    let mut token = Token([0; 16]);
    getrandom::fill(&mut token.0).map_err(|error| MigrateError::Local {
        action: "draw a random number",
        source: std::io::Error::other(error),
    })?;
    Ok(token)
}

fn refused(code: ReasonCode, text: &str) -> MigrateError {
    MigrateError::Refused { peer: "destination", reason: Reason::new(code, text) }
}

/// What the VMM said, as the source's operator reads it.
fn refusal(error: PrepareError) -> MigrateError {
    let code = match &error {
        PrepareError::Identity { .. } => ReasonCode::IdentityMismatch,
        PrepareError::Layout { .. } => ReasonCode::LayoutMismatch,
        PrepareError::Incompatible(_) => ReasonCode::Incompatible,
        PrepareError::Vm(_) => ReasonCode::VmRefused,
    };
    refused(code, &crate::error::chain(&error))
}

impl Notice {
    fn turned_away(peer: &str, error: &MigrateError) -> Self {
        Self::TurnedAway { peer: peer.to_owned(), reason: crate::error::chain(error) }
    }
}

/// Answers whoever comes while no session is live.
pub fn answer_idle(
    arrival: Arrival,
    directory: &std::path::Path,
    on_control: HelloStatus,
) -> Option<Notice> {
    match arrival {
        Arrival::Control(connection) => {
            let peer = connection.peer.address.clone();
            turn_away(connection, on_control);
            Some(Notice::TurnedAway { peer, reason: "a guest runs here already".into() })
        }
        Arrival::Data { connection, .. } => {
            let peer = connection.peer.address.clone();
            turn_away(connection, HelloStatus::BadToken);
            Some(Notice::TurnedAway { peer, reason: "a data channel of no session".into() })
        }
        Arrival::Query { session, connection } => {
            let peer = connection.peer.address.clone();
            let answered = give_word(directory, session, connection);
            answered.err().map(|error| Notice::turned_away(&peer, &error))
        }
        Arrival::TurnedAway { peer, error } => Some(Notice::turned_away(&peer, &error)),
    }
}
