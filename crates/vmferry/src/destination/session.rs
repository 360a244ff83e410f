//! The driver of one session at the destination: carries the machine's actions out with a VMM,
//! threads and channels.

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
use super::io::{Action, Ending, Input, LinkId};
use super::machine::Destination;
use super::place::PlacedCounters;
use super::receive::Notice;
use super::reception::Reception;
use super::target::{LaneEnds, LaneSet, Target};
use crate::config::DestinationConfig;
use crate::cpu::CpuMeter;
use crate::error::MigrateError;
use crate::journal::{FileJournal, Record};
use crate::life::Life;
use crate::link::{ControlSlot, ControlWriter};
use crate::peer::DestinationSide;
use crate::stats::DestinationStats;
use crate::vm::DestinationVm;

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
    /// Whether it stays paused, as it was at the source.
    pub paused: bool,
    /// The figures.
    pub stats: DestinationStats,
    /// The source is here again, and begins anew.
    pub successor: Option<Connection>,
    /// The user wants no guest any more.
    pub stopped: bool,
}

/// What a control channel has brought: what an old one still says is not heard.
struct FromControl {
    attempt: u64,
    input: Input,
}

/// One session at work.
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
    /// What the control channel brings. There is no queue: its reader goes on when a message was
    /// taken, so that a source that says more than is heard waits.
    heard: (Sender<FromControl>, Receiver<FromControl>),
    /// What query channels bring, in the same way.
    asked: (Sender<Input>, Receiver<Input>),
    /// Whether the control channel may bring FINAL.
    wants_final: Arc<AtomicBool>,
    /// What the lanes have placed whole, told once until it is taken.
    ends: Arc<LaneEnds>,
    /// How often the control channel was dialled before.
    attempt: u64,
    /// The control channel for those who acknowledge.
    control: Arc<ControlSlot>,
    life: Life,
    successor: Option<Connection>,
    journal: Option<FileJournal>,
    guest: Option<GuestIdentity>,
    target: Option<Target>,
    expected_lanes: u8,
    lanes: Option<Box<dyn LaneSet>>,
    placed: Arc<PlacedCounters>,
    /// Bytes that had arrived when the source was told so last.
    arrived: u64,
    arrival_told: Instant,
    cpu: CpuMeter,
    stopping: bool,
}

/// Messages of the source that may wait while the session's thread waits for its VMM. None of them
/// has more than 64 KiB but FINAL, of which there is one. Over `grpc-ack:` the source can say
/// nothing, PING included, before the message ahead of it was read.
const MOST_HEARD: usize = 64;

impl<'a, V: DestinationVm> Session<'a, V> {
    /// A session on a connection whose greeting is not yet answered.
    ///
    /// # Errors
    /// If the answer can't be sent, or the system has no random numbers or threads.
    pub fn begin(
        vm: &'a mut V,
        config: &'a DestinationConfig,
        door: &'a Reception,
        stop: &'a Receiver<()>,
        mut connection: Connection,
    ) -> Result<Self, MigrateError> {
        let token = random_token()?;
        reply(&mut connection, HelloStatus::Ok, 0)?;
        let our_side = DestinationSide {
            vmm: vm.release(),
            algorithms: config.algorithms,
            protocol: connection.versions.version,
        };
        let control = Arc::default();
        let life = Life::begin(Arc::clone(&control))
            .map_err(|source| MigrateError::Local { action: "start a thread", source })?;
        let mut session = Self {
            vm,
            config,
            door,
            stop,
            machine: Destination::new(config.timeouts, token, our_side, Duration::ZERO),
            token,
            started: Instant::now(),
            peer: connection.peer.clone(),
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
            expected_lanes: 0,
            lanes: None,
            placed: Arc::default(),
            arrived: 0,
            arrival_told: Instant::now(),
            cpu: CpuMeter::default(),
            stopping: false,
        };
        session.begin_control(connection)?;
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
                self.life.step();
                // Before it hears that it may say it.
                self.wants_final.store(self.machine.wants_final(), Ordering::Release);
                let result = self.execute(action);
                self.life.step();
                if let Some(input) = result {
                    self.machine.handle(self.started.elapsed(), input);
                }
            }
            if let Some(ending) = self.machine.ending() {
                break ending;
            }
            let input = self.await_input(watch);
            if self.tell_what_arrives() {
                self.machine.handle(self.started.elapsed(), Input::Arriving);
            }
            self.machine.handle(self.started.elapsed(), input);
            self.wants_final.store(self.machine.wants_final(), Ordering::Release);
            if self.machine.is_waiting_for_source()
                && let Some(control) = self.links.get(&LinkId::CONTROL)
            {
                // Where only one direction is cut, the source is to hear of it too.
                control.closer.close();
            }
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

    /// Says now and then that frames arrive, and how far the lanes are, where the link is too slow
    /// for whole ones: a source takes a destination that places nothing for one that hangs. Whether
    /// anything has arrived.
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

    fn await_input(&mut self, watch: &mut dyn FnMut(&Notice)) -> Input {
        let tick = self.machine.next_tick().map(|at| self.started + at);
        let wait = tick
            .map_or(ARRIVAL_INTERVAL, |at| at.saturating_duration_since(Instant::now()))
            .min(ARRIVAL_INTERVAL);
        crossbeam_channel::select! {
            recv(self.heard.1) -> from => match from {
                // What still comes on a channel that is given up may be out of date.
                Ok(FromControl { attempt, input })
                    if attempt == self.attempt && !self.machine.is_waiting_for_source() =>
                {
                    input
                }
                _ => Input::Tick,
            },
            recv(self.inputs.1) -> input => match input {
                Ok(Input::LaneLost { lane, attempt, .. }) if !self.is_at(lane, attempt) => Input::Tick,
                Ok(Input::LaneEnded { lane, .. }) => {
                    Input::LaneEnded { lane, sequence: self.ends.take(lane) }
                }
                Ok(Input::StreamRefused { source }) => Input::Failed(self.why_refused(source)),
                Ok(input) => input,
                Err(_) => Input::Tick,
            },
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
            Action::ExpectLanes { lanes } => {
                self.expected_lanes = lanes;
                None
            }
            Action::SumDigest => {
                Some(Input::Digest(self.target.as_ref().map_or(0, Target::digest)))
            }
            Action::Load { state, paused } => {
                let begun = Instant::now();
                let ready = if paused { self.vm.stay_paused() } else { Ok(()) };
                let loaded = ready.and_then(|()| self.vm.load(&state)).map(|()| begun.elapsed());
                Some(Input::Loaded(loaded.map_err(|source| MigrateError::Vm {
                    action: "load the guest's state",
                    source,
                })))
            }
            Action::Hash { except } => self.hash(except),
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
                self.target = None;
                self.vm.discard();
                None
            }
            Action::Report(_) => None,
        }
    }
}

/// How often a source is told that frames arrive: a fraction of any time-out.
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
