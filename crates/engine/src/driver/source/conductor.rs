//! The source's driver: carries out the machine's actions with a VMM, threads and channels.
//!
//! The operations on the guest depend on how it is moved (`memory`: the engine reads its memory;
//! `streams`: it is carried). Channels, journal, handover and orders are the same.

mod links;
mod memory;
mod start;
mod storage;
mod streams;

use std::sync::Arc;
use std::time::{Duration, Instant};
use vmferry_handover::{Resume, SourceGuest, VmError, WitnessRequest, write_commit};

use crossbeam_channel::{Receiver, Sender};
use vmferry_transport::{Dialer, RateLimiter};

use super::control::ControlLink;
use super::fetch::FetchServers;
use super::orders::Orders;
use super::redial::Redialer;
use crate::causes::chain;
use crate::config::compression::worker_threads;
use crate::config::{ChannelCount, ConfigError, PostCopy, SourceConfig, WhenStuck, window_frames};
use crate::cpu::CpuMeter;
use crate::data::source::chooser::Chooser;
use crate::data::source::lane::{LaneSender, Signal, SourceLane};
use crate::data::source::page_encoder::PageEncoder;
use crate::driver::life::Life;
use crate::error::MigrateError;
use crate::machine::peer::SourceSide;
use crate::machine::source::Source;
use crate::machine::source::io::{Action, Ending, Input, Report};
use crate::stats::SourceStats;
use crate::vmm::streamed::{StreamEvent, StreamedVm};
use crate::vmm::{GuestDescription, SourceVm};
use crate::witness::ask_witness;
use memory::MemoryGuest;
use streams::StreamedGuest;
use vmferry_handover::journal::{FileJournal, Journal, Record};

/// How a migration ended, as seen by the source. Being in doubt is not an outcome: the migration
/// continues to ask.
#[derive(Debug)]
pub enum SourceOutcome<V> {
    /// The guest runs here.
    Kept {
        /// The VMM.
        vm: V,
        /// Why the guest was not migrated.
        error: MigrateError,
        /// The statistics up to the end.
        stats: Box<SourceStats>,
    },
    /// The destination had the guest, which has lost the pages that it had not fetched yet. Its
    /// VMM there has to be ended, and the guest started from its disks.
    Lost {
        /// The VMM, paused permanently, to be torn down.
        vm: V,
        /// Why pages were lost.
        error: MigrateError,
        /// The statistics.
        stats: Box<SourceStats>,
    },
    /// The destination owns the guest.
    Given {
        /// The VMM, paused permanently, to be torn down.
        vm: V,
        /// The statistics.
        stats: Box<SourceStats>,
    },
}

/// Migrates a guest to the destination that `dialer` reaches, on the calling thread.
///
/// `watch` is called with every report, between two steps, and should return quickly. `orders`
/// cancels from other threads, and resolves a handover that is in doubt.
///
/// ```
/// use std::sync::Arc;
///
/// use vmferry::source::{Orders, SourceOutcome, migrate};
/// use vmferry::{SourceConfig, SourceVm, chain};
/// use vmferry_transport::{Dialer, IdentityFiles, TlsIdentity};
///
/// /// Sends a guest; gives its VMM back if the guest stays.
/// fn send<V: SourceVm>(vm: V, orders: &Orders) -> Result<Option<V>, Box<dyn std::error::Error>> {
///     let files = IdentityFiles::in_directory("/etc/vmferry/tls".as_ref());
///     let identity = Arc::new(TlsIdentity::new(files)?);
///     let dialer = Dialer::new("tls:host-b.example:7001".parse()?, Some(identity));
///     let config = SourceConfig::new("/var/lib/firebird/journals".into());
///     match migrate(vm, &dialer, config, orders, &mut |report| println!("{report:?}")) {
///         SourceOutcome::Given { vm, stats } => {
///             drop(vm); // It is the destination's, and never runs here again.
///             println!("downtime {:.1} ms", stats.downtime_ms);
///             Ok(None)
///         }
///         SourceOutcome::Lost { vm, error, .. } => {
///             drop(vm);
///             Err(error.into()) // Only with post-copy.
///         }
///         SourceOutcome::Kept { vm, error, .. } => {
///             eprintln!("it runs on here: {}", chain(&error));
///             Ok(Some(vm))
///         }
///     }
/// }
/// ```
pub fn migrate<V: SourceVm>(
    vm: V,
    dialer: &Dialer,
    config: SourceConfig,
    orders: &Orders,
    watch: &mut dyn FnMut(&Report),
) -> SourceOutcome<V> {
    let guest = vm.describe();
    let (memory, log, free_pages) = (vm.memory(), vm.dirty_log(), vm.free_pages());
    let state = vm.state_estimate();
    let (vmm, used_bytes) = (vm.release(), vm.used_bytes());
    let our_side = SourceSide { vmm, used_bytes, ..SourceSide::new(log.name()) };
    conduct(vm, (guest, our_side), dialer, config, orders, watch, |core| {
        core.machine.expect_state(state);
        MemoryGuest::new(memory, log, free_pages, core)
    })
}

/// The same for a [carried](crate::vmm::streamed) guest. `config.channels` is ignored: each stream
/// has one channel.
pub fn migrate_streamed<V: StreamedVm>(
    mut vm: V,
    dialer: &Dialer,
    mut config: SourceConfig,
    orders: &Orders,
    watch: &mut dyn FnMut(&Report),
) -> SourceOutcome<V> {
    let channels = if config.verify {
        Err(ConfigError::NothingToVerify)
    } else if config.pause_before_switchover {
        Err(ConfigError::NothingToHold)
    } else {
        ChannelCount::new(vm.streams())
    };
    match channels {
        Ok(channels) => config.channels = channels,
        Err(error) => {
            return SourceOutcome::Kept { vm, error: error.into(), stats: Box::default() };
        }
    }
    let is_wanted = config.post_copy != PostCopy::Never || config.when_stuck == WhenStuck::PostCopy;
    let allowed = is_wanted.then(|| vm.allow_post_copy().map_err(|error| chain(&*error)));
    let (guest, state) = (vm.describe(), vm.state_estimate());
    let our_side = SourceSide {
        vmm: vm.release(),
        streams: true,
        vmm_post_copy: allowed,
        ..SourceSide::new("VMM")
    };
    conduct(vm, (guest, our_side), dialer, config, orders, watch, |core| {
        core.machine.expect_state(state);
        StreamedGuest::new(core)
    })
}

/// Migrates a guest, with its way of moving in `side`.
fn conduct<V: Resume, G: GuestSide<V>>(
    vm: V,
    guest: (GuestDescription, SourceSide),
    dialer: &Dialer,
    config: SourceConfig,
    orders: &Orders,
    watch: &mut dyn FnMut(&Report),
    side: impl FnOnce(&mut Core<'_, V>) -> G,
) -> SourceOutcome<V> {
    let (cpu, conductor) = (CpuMeter::default(), CpuMeter::default());
    let guards = (cpu.count_this_thread(), conductor.count_this_thread());
    let mut core = match Core::connect(vm, guest, dialer, config, orders, &cpu) {
        Ok(core) => core,
        Err((vm, error)) => {
            orders.detach();
            return SourceOutcome::Kept { vm, error: *error, stats: Box::default() };
        }
    };
    let mut side = side(&mut core);
    let ending = core.run(&mut side, watch);
    orders.detach();
    let (held, resume_failure, mut stats) = core.finish(side);
    drop(guards);
    stats.engine_cpu_s = cpu.seconds();
    stats.planning_cpu_s += conductor.seconds();
    let stats = Box::new(stats);
    let vm = match held {
        SourceGuest::Running(running) => running.into_vm(),
        SourceGuest::Released(vm) => vm,
        SourceGuest::Paused(paused) => paused.into_vm().unwrap_or_else(gone),
        SourceGuest::Committed(_) | SourceGuest::Moving => gone(),
    };
    match (ending, resume_failure) {
        (Ending::Given, _) => SourceOutcome::Given { vm, stats },
        (Ending::Lost(error), _) => SourceOutcome::Lost { vm, error, stats },
        // That the guest is still paused matters more than why it was not migrated.
        (Ending::Kept(_), Some(source)) => {
            let error = MigrateError::Vm { action: "resume the guest", source };
            SourceOutcome::Kept { vm, error, stats }
        }
        (Ending::Kept(error), None) => SourceOutcome::Kept { vm, error, stats },
    }
}

/// The handover's types exclude this: the guest is running, paused or released.
fn gone<V>() -> V {
    unreachable!("a migration ends with an owner of the guest")
}

/// The operations on the guest and on the data that it sends.
trait GuestSide<V: Resume> {
    /// Carries out an action on the guest.
    fn execute(&mut self, core: &mut Core<'_, V>, action: Action) -> Option<Input>;

    /// An encoder for each lane's sender, if senders encode pages themselves.
    fn sender_encoder(&self, core: &Core<'_, V>) -> Option<PageEncoder>;

    /// Called when all lanes have channels.
    fn lanes_are_open(&mut self, core: &Core<'_, V>) -> Result<(), MigrateError>;

    /// Processes an event of a carried guest's VMM.
    fn heard(&mut self, core: &mut Core<'_, V>, event: StreamEvent) -> Input;

    /// Performs periodic work, and returns when it is due next.
    fn review(&mut self, core: &mut Core<'_, V>) -> Option<Duration>;

    /// The guest stays here: if its VMM closes a socket from now on, this is not the end of a
    /// stream.
    fn give_up(&mut self);

    /// No more frames are wanted, and the lanes are closed.
    fn stop(&mut self, core: &mut Core<'_, V>);
}

/// Asks the session's witness. The answer is an input.
pub(super) fn ask_for(
    config: &SourceConfig,
    request: Option<WitnessRequest>,
    inputs: &Sender<Input>,
) {
    if let Some(witness) = &config.witness {
        ask_witness(witness, config.session, request, inputs, Input::Register);
    }
}

struct Core<'a, V: Resume> {
    machine: Source,
    guest: SourceGuest<V>,
    config: SourceConfig,
    dialer: Dialer,
    orders: &'a Orders,
    started: Instant,
    resume_failure: Option<VmError>,
    journal: FileJournal,
    control: ControlLink,
    life: Life,
    inputs: (Sender<Input>, Receiver<Input>),
    /// Raised for threads that make frames.
    signal: Arc<Signal>,
    lanes: Vec<Arc<SourceLane>>,
    /// The senders of the lanes that have channels.
    senders: Vec<LaneSender>,
    /// The servers of the fetch lanes that have channels.
    fetch: FetchServers,
    redialer: Redialer,
    limiter: RateLimiter,
    chooser: Arc<Chooser>,
    cpu: CpuMeter,
    transport: String,
    /// Number of frames that data channels had accepted at the last check.
    sent_frames: u64,
}

impl<V: Resume> Core<'_, V> {
    fn run(&mut self, side: &mut impl GuestSide<V>, watch: &mut dyn FnMut(&Report)) -> Ending {
        loop {
            while let Some(action) = self.machine.next_action() {
                self.orders.publish(self.machine.phase_name(), self.machine.handover());
                let begun = self.now();
                self.life.step();
                if let Action::Report(report) = &action {
                    self.orders.publish_report(report);
                    watch(report);
                }
                let input = self.execute(side, action);
                self.life.step();
                let took = self.now() - begun;
                self.machine.handle(self.now(), Input::Away { took });
                if let Some(input) = input {
                    self.machine.handle(self.now(), input);
                }
            }
            if let Some(ending) = self.machine.ending() {
                return ending;
            }
            let input = self.await_input(side);
            if self.has_sent() {
                self.machine.handle(self.now(), Input::Flowing);
            }
            self.machine.handle(self.now(), input);
        }
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn await_input(&mut self, side: &mut impl GuestSide<V>) -> Input {
        let tick = self.machine.next_tick().map(|at| self.started + at);
        let wait =
            tick.map_or(Duration::from_secs(1), |at| at.saturating_duration_since(Instant::now()));
        let wait = side.review(self).map_or(wait, |period| wait.min(period));
        crossbeam_channel::select! {
            recv(self.control.heard()) -> from => {
                from.map_or(Input::Tick, |from| self.control.take_heard(from))
            }
            recv(self.inputs.1) -> input => match input {
                Ok(Input::LaneLost { lane, attempt, .. }) if !self.is_at(lane, attempt) => {
                    Input::Tick
                }
                Ok(Input::Vmm(event)) => side.heard(self, event),
                Ok(input) => input,
                Err(_) => Input::Tick,
            },
            recv(self.control.dialed()) -> dialed => {
                dialed.map_or(Input::Tick, |dialed| self.control.take_dialed(dialed))
            }
            recv(self.redialer.dialed()) -> dialed => {
                dialed.map_or(Input::Tick, |dialed| self.rejoin(side, dialed))
            }
            default(wait) => Input::Tick,
        }
    }

    fn execute(&mut self, side: &mut impl GuestSide<V>, action: Action) -> Option<Input> {
        match action {
            Action::Send(message) => self.send(&message),
            Action::OpenLanes(token) => {
                let opened = self.open_lanes(side, &token);
                Some(opened.map_or_else(Input::Failed, |()| Input::LanesJoined))
            }
            Action::OpenFetchLanes { token, attempts } => {
                let opened = self.open_fetch_lanes(side, token, &attempts);
                Some(opened.map_or_else(Input::Failed, |()| Input::FetchLanesJoined))
            }
            Action::ResumeControl { token, attempt, delay } => {
                self.control.resume(token, attempt, delay);
                None
            }
            Action::RejoinLane { lane, token, attempt, delay } => {
                self.redial(lane, token, attempt, delay);
                None
            }
            Action::FitWindows { round_trip } => {
                let workers = worker_threads(self.config.compression.workers);
                let frames = window_frames(self.config.channels.get(), workers, round_trip);
                self.lanes.iter().for_each(|lane| lane.set_window(frames));
                None
            }
            Action::Cap(cap) => {
                self.limiter.set_rate(cap);
                self.chooser.set_cap(cap);
                None
            }
            Action::PackWith(algorithms) => {
                self.chooser.set_algorithms(algorithms);
                None
            }
            Action::WriteCommit(kind) => {
                let written = write_commit(&mut self.journal, kind);
                let committed = written.map(|proof| self.guest.commit(proof));
                Some(Input::CommitWritten(committed.map_err(Into::into)))
            }
            // If the guest could not be resumed, the session stays open, so that a recovery tries
            // again.
            Action::WriteOutcome(Record::Kept { .. }) if self.resume_failure.is_some() => None,
            Action::WriteOutcome(record) => {
                // The decisive promise is already written; this record is for `vmferry status`.
                let _ = self.journal.append(&record);
                None
            }
            Action::Resume => {
                side.give_up();
                self.fetch.end_tunnels();
                if let Err(error) = self.guest.resume(self.machine.handover()) {
                    self.resume_failure = Some(error);
                }
                None
            }
            Action::Release => {
                self.guest.release();
                None
            }
            Action::Ask { delay, offer } => {
                self.control.ask(delay, offer);
                None
            }
            Action::AskWitness(request) => {
                ask_for(&self.config, request, &self.inputs.0);
                None
            }
            Action::Report(_) => None,
            action => side.execute(self, action),
        }
    }

    /// Stops everything and returns the guest with the statistics.
    fn finish(
        mut self,
        mut side: impl GuestSide<V>,
    ) -> (SourceGuest<V>, Option<VmError>, SourceStats) {
        self.control.stop_dialing();
        self.redialer.stop();
        self.signal.close();
        self.lanes.iter().for_each(|lane| lane.close());
        // A sender may be waiting for the bandwidth limiter.
        self.limiter.close();
        self.fetch.stop();
        side.stop(&mut self);
        self.control.say_goodbye();
        self.senders.iter().for_each(LaneSender::close_channel);
        self.control.close();
        self.senders.clear();
        drop(side);
        let mut stats = self.machine.stats().clone();
        stats.planning_cpu_s = self.chooser.planning().as_secs_f64();
        stats.transport = std::mem::take(&mut self.transport);
        let held = self.guest.take();
        (held, self.resume_failure.take(), stats)
    }
}
