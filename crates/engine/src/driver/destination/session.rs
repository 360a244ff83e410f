//! The driver of a session at the destination: carries out the machine's actions with a VMM,
//! threads and channels.

pub mod fetch;
mod guest;
mod links;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use vmferry_transport::{ChannelCloser, ChannelWriter, PeerIdentity};
use vmferry_wire::{GuestIdentity, HelloStatus, SessionId, Token};

use super::arrivals::{Arrival, Connection, reply};
use super::notice::Notice;
use super::reception::Reception;
use crate::config::DestinationConfig;
use crate::cpu::CpuMeter;
use crate::data::destination::fetch::handle::FetchHandle;
use crate::data::destination::fetch::lanes::FetchLanes;
use crate::data::destination::late_lanes::LateLanes;
use crate::data::destination::place::PlacedCounters;
use crate::data::destination::target::{LaneEnds, LaneSet, Target};
use crate::data::destination::tunnel_lanes::TunnelLanes;
use crate::driver::life::Life;
use crate::error::MigrateError;
use crate::link::{ControlSlot, ControlWriter};
use crate::machine::destination::Destination;
use crate::machine::destination::io::{Action, Ending, Input, LinkId};
use crate::machine::peer::DestinationSide;
use crate::stats::{DestinationStats, FetchStats};
use crate::vmm::DestinationVm;
use crate::witness::{ask_witness, witness_id};
use vmferry_faults::FaultError;
use vmferry_handover::WitnessRequest;
use vmferry_handover::journal::{FileJournal, Record};

struct Link {
    writer: Arc<ControlWriter<ChannelWriter>>,
    closer: ChannelCloser,
}

/// The result of a session.
pub struct Ended {
    /// How it ended.
    pub ending: Ending,
    /// The session, if it was announced.
    pub session: Option<SessionId>,
    /// The guest, if it was announced.
    pub guest: Option<GuestIdentity>,
    /// Whether the guest stays paused, as it was at the source.
    pub paused: bool,
    /// The statistics.
    pub stats: DestinationStats,
    /// A connection of the source that starts a new session.
    pub successor: Option<Connection>,
    /// Whether the user has stopped receiving.
    pub stopped: bool,
}

/// An input of a control channel, with the channel's number: inputs of an old channel are ignored.
struct FromControl {
    attempt: u64,
    input: Input,
}

/// A running session.
pub struct Session<'a, V> {
    vm: &'a mut V,
    config: &'a DestinationConfig,
    door: &'a Reception,
    stop: &'a Receiver<()>,
    machine: Destination,
    token: Token,
    started: Instant,
    peer: PeerIdentity,
    inputs: (Sender<Input>, Receiver<Input>),
    links: BTreeMap<LinkId, Link>,
    next_link: u64,
    /// Inputs of the control channel, without a queue: its reader continues when a message was
    /// taken, so a source that sends too much is slowed down.
    heard: (Sender<FromControl>, Receiver<FromControl>),
    /// Inputs of query channels, likewise.
    asked: (Sender<Input>, Receiver<Input>),
    /// Whether FINAL may be read from the control channel.
    wants_final: Arc<AtomicBool>,
    /// Completed rounds of the lanes, of which each lane reports one at a time.
    ends: Arc<LaneEnds>,
    /// How often the control channel was dialed before.
    attempt: u64,
    /// The control channel for acknowledgements.
    control: Arc<ControlSlot>,
    life: Life,
    successor: Option<Connection>,
    journal: Option<FileJournal>,
    guest: Option<GuestIdentity>,
    target: Option<Target>,
    /// A VMM that takes streams has loaded the guest before FINAL.
    is_loaded: bool,
    expected_lanes: u8,
    lanes: Option<Box<dyn LaneSet>>,
    /// The fetch lanes, if the guest may run before all its pages have arrived.
    fetch_lanes: Option<LateLanes>,
    /// When to ask a VMM again that still awaits pages.
    vmm_awaits: Receiver<Instant>,
    /// The progress of the fetch, once the guest runs.
    fetch: Option<FetchHandle>,
    fetch_stats: Option<FetchStats>,
    placed: Arc<PlacedCounters>,
    /// Bytes that had arrived when the source was last notified.
    arrived: u64,
    arrival_told: Instant,
    cpu: CpuMeter,
    stopping: bool,
}

/// Messages of the source that may wait while the session's thread waits for its VMM. None is
/// larger than 64 KiB, except FINAL, of which there is one. Over `grpc-ack:` the source can send
/// nothing, not even PING, before the previous message was read.
const MOST_HEARD: usize = 64;

impl<'a, V: DestinationVm> Session<'a, V> {
    /// A session on a connection whose greeting was not answered yet.
    ///
    /// # Errors
    /// The answer can't be sent, or the system lacks random numbers or threads.
    pub fn begin(
        vm: &'a mut V,
        config: &'a DestinationConfig,
        door: &'a Reception,
        stop: &'a Receiver<()>,
        mut connection: Connection,
    ) -> Result<Self, MigrateError> {
        let token = random_token()?;
        reply(&mut connection, HelloStatus::Ok, 0)?;
        let our_side = Self::side(vm, config, connection.versions.version);
        let machine = Destination::new(config.timeouts, token, our_side, Duration::ZERO);
        let peer = connection.peer.clone();
        let mut session = Self::new(vm, config, (door, stop), (machine, token), peer)?;
        session.begin_control(connection)?;
        Ok(session)
    }

    fn side(vm: &V, config: &DestinationConfig, protocol: u16) -> DestinationSide {
        let witness = witness_id(config.witness.as_deref());
        DestinationSide { vmm: vm.release(), algorithms: config.algorithms, witness, protocol }
    }

    /// A session without channels.
    fn new(
        vm: &'a mut V,
        config: &'a DestinationConfig,
        (door, stop): (&'a Reception, &'a Receiver<()>),
        (machine, token): (Destination, Token),
        peer: PeerIdentity,
    ) -> Result<Self, MigrateError> {
        let control = Arc::default();
        let life = Life::begin(Arc::clone(&control)).map_err(MigrateError::no_thread)?;
        Ok(Self {
            vm,
            config,
            door,
            stop,
            machine,
            token,
            started: Instant::now(),
            peer,
            inputs: crossbeam_channel::unbounded(),
            links: BTreeMap::new(),
            next_link: LinkId::CONTROL.0 + 1,
            heard: crossbeam_channel::bounded(MOST_HEARD),
            asked: crossbeam_channel::bounded(0),
            wants_final: Arc::default(),
            ends: Arc::default(),
            attempt: 0,
            control,
            life,
            successor: None,
            journal: None,
            guest: None,
            target: None,
            is_loaded: false,
            expected_lanes: 0,
            lanes: None,
            fetch_lanes: None,
            vmm_awaits: crossbeam_channel::never(),
            fetch: None,
            fetch_stats: None,
            placed: Arc::default(),
            arrived: 0,
            arrival_told: Instant::now(),
            cpu: CpuMeter::default(),
            stopping: false,
        })
    }

    /// Runs the session to its end.
    pub fn run(mut self, watch: &mut dyn FnMut(&Notice)) -> Ended {
        let guard = self.cpu.count_this_thread();
        let ending = loop {
            while let Some(action) = self.machine.next_action() {
                if let Action::Report(report) = &action {
                    watch(&Notice::Session(report.clone()));
                }
                self.life.step();
                // Before the source learns that it may send FINAL.
                self.wants_final.store(self.machine.wants_final(), Ordering::Release);
                let begun = Instant::now();
                let result = self.execute(action);
                self.life.step();
                self.machine.handle(self.started.elapsed(), Input::Away { took: begun.elapsed() });
                if let Some(input) = result {
                    self.machine.handle(self.started.elapsed(), input);
                }
            }
            if let Some(ending) = self.machine.ending() {
                break ending;
            }
            let input = self.await_input(watch);
            self.show_fetch(watch);
            if self.tell_what_arrives() {
                self.machine.handle(self.started.elapsed(), Input::Arriving);
            }
            self.machine.handle(self.started.elapsed(), input);
            self.wants_final.store(self.machine.wants_final(), Ordering::Release);
            if self.machine.is_waiting_for_source()
                && let Some(control) = self.links.get(&LinkId::CONTROL)
            {
                // If only one direction is broken, the source would not notice the loss otherwise.
                control.closer.close();
            }
        };
        let fetched = self.end_fetch();
        self.close();
        if matches!(ending, Ending::Owns(_)) {
            self.vm.fetch_ends();
        }
        drop(guard);
        let mut stats = self.machine.stats().clone();
        let placed = &self.placed;
        stats.frames = placed.frames.load(Ordering::Relaxed);
        stats.content_pages = placed.content_pages.load(Ordering::Relaxed);
        stats.zero_pages = placed.zero_pages.load(Ordering::Relaxed);
        stats.received_bytes = placed.bytes.load(Ordering::Relaxed);
        stats.fetch = fetched;
        stats.engine_cpu_s = self.cpu.seconds();
        Ended {
            ending,
            session: self.machine.session(),
            guest: self.guest.take(),
            paused: self.machine.stays_paused(),
            stats,
            successor: self.successor.take(),
            stopped: self.stopping,
        }
    }

    /// Periodically reports arriving bytes and the progress of the lanes while the link is too slow
    /// for whole frames, because a source assumes that a destination that places nothing hangs.
    /// Returns whether anything has arrived.
    fn tell_what_arrives(&mut self) -> bool {
        if self.arrival_told.elapsed() < ARRIVAL_INTERVAL {
            return false;
        }
        self.arrival_told = Instant::now();
        let arrived = self.placed.arrived.load(Ordering::Relaxed);
        let more = std::mem::replace(&mut self.arrived, arrived) != arrived;
        if more && let Some(lanes) = &self.lanes {
            lanes.acknowledge();
        }
        more
    }

    /// The next input.
    fn await_input(&mut self, watch: &mut dyn FnMut(&Notice)) -> Input {
        let tick = self.machine.next_tick().map(|at| self.started + at);
        let wait = tick
            .map_or(ARRIVAL_INTERVAL, |at| at.saturating_duration_since(Instant::now()))
            .min(ARRIVAL_INTERVAL);
        crossbeam_channel::select! {
            recv(self.heard.1) -> from => match from {
                // Messages that still arrive on an abandoned channel may be outdated.
                Ok(FromControl { attempt, input })
                    if attempt == self.attempt && !self.machine.is_waiting_for_source() =>
                {
                    input
                }
                _ => Input::Tick,
            },
            recv(self.inputs.1) -> input => match input {
                Ok(Input::LaneLost { lane, attempt, .. }) if !self.is_at(lane, attempt) => {
                    Input::Tick
                }
                Ok(lost @ Input::LaneLost { .. }) => {
                    if let Some(lanes) = &self.fetch_lanes {
                        lanes.lost();
                    }
                    lost
                }
                Ok(Input::Fetched) => {
                    self.note_fetched();
                    Input::Fetched
                }
                Ok(Input::LaneEnded { lane, .. }) => {
                    Input::LaneEnded { lane, sequence: self.ends.take(lane) }
                }
                Ok(Input::StreamRefused) => self.stream_refused(),
                Ok(Input::RequestsEnded) => self.requests_ended(),
                Ok(Input::VmmGone) => self.vmm_gone(),
                Ok(Input::Failed(MigrateError::Faults(FaultError::ProcessGone { .. })))
                    if self.machine.handover().is_fetching() =>
                {
                    self.vmm_gone()
                }
                Ok(input) => input,
                Err(_) => Input::Tick,
            },
            recv(self.vmm_awaits) -> _ => self.requests_ended(),
            recv(self.asked.1) -> asked => asked.unwrap_or(Input::Tick),
            recv(self.door.arrivals) -> arrival => match arrival {
                Ok(Arrival::TurnedAway(notice)) => {
                    watch(&notice);
                    Input::Tick
                }
                Ok(arrival) => {
                    let door = self.door;
                    self.on_arrival(arrival, &mut |notice| door.tell_of(notice))
                }
                Err(_) => Input::Tick,
            },
            recv(if self.stopping { &NEVER } else { self.stop }) -> _ => {
                self.stopping = true;
                Input::Cancel
            }
            default(wait) => Input::Tick,
        }
    }

    fn execute(&mut self, action: Action) -> Option<Input> {
        match action {
            Action::Send { link, message } => self.send(link, &message),
            Action::Broadcast(message) => {
                let links: Vec<LinkId> = self.links.keys().copied().collect();
                links.into_iter().filter_map(|link| self.send(link, &message)).next()
            }
            Action::Prepare { guest, streams, used_bytes } => {
                Some(Input::Prepared(self.prepare(&guest, streams, &used_bytes)))
            }
            Action::Open(session) => Some(Input::Opened(self.open(session))),
            Action::ExpectLanes { lanes, fetch_lanes } => {
                self.expected_lanes = lanes;
                self.fetch_lanes = fetch_lanes.map(|announced| match self.target {
                    Some(Target::Streams(_)) => {
                        let (results, cpu) = (self.inputs.0.clone(), &self.cpu);
                        LateLanes::Tunnels(TunnelLanes::new(lanes, announced, results, cpu))
                    }
                    _ => LateLanes::Pages(FetchLanes::new(lanes, announced)),
                });
                None
            }
            Action::FreeOutdated { runs } => self.free_outdated(&runs).err().map(Input::Failed),
            Action::FetchMissing { missing } => {
                self.fetch_missing(missing).err().map(Input::Failed)
            }
            Action::SumDigest => {
                Some(Input::Digest(self.target.as_ref().map_or(0, Target::digest)))
            }
            Action::Load { state, paused, storage_sample } => {
                Some(Input::Loaded(self.compare_and_load(&state, paused, &storage_sample)))
            }
            Action::Hash { except } => self.hash(except),
            Action::Claim => {
                if let (Some(witness), Some(session)) =
                    (&self.config.witness, self.machine.session())
                {
                    let request = Some(WitnessRequest::Claim);
                    ask_witness(witness, session, request, &self.inputs.0, Input::Claimed);
                }
                None
            }
            Action::WriteIntent(kind) => {
                Some(Input::IntentWritten(self.write(&Record::run_intent(kind))))
            }
            Action::WriteFetched => Some(Input::FetchedWritten(self.write_again(&Record::Fetched))),
            Action::WriteEnded => Some(Input::EndedWritten(self.write_again(&Record::Ended))),
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
            Action::FetchAll => {
                self.fetch_all();
                None
            }
            Action::UseOffer { link, offer } => self.use_offer(link, offer),
            Action::Discard => {
                self.end_lanes();
                if let Some(lanes) = self.fetch_lanes.take().as_ref().and_then(LateLanes::pages) {
                    lanes.discard();
                }
                self.target = None;
                self.is_loaded = false;
                self.vm.discard();
                None
            }
            Action::Report(_) => None,
        }
    }
}

/// How often the source is notified of arriving frames: a fraction of any timeout.
const ARRIVAL_INTERVAL: Duration = Duration::from_secs(1);

static NEVER: std::sync::LazyLock<Receiver<()>> =
    std::sync::LazyLock::new(crossbeam_channel::never);

fn random_token() -> Result<Token, MigrateError> {
    let mut token = Token([0; 16]);
    getrandom::fill(&mut token.0).map_err(|error| MigrateError::Local {
        action: "draw a random number",
        source: std::io::Error::other(error),
    })?;
    Ok(token)
}
