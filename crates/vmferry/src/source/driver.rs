//! The driver of the source: carries the machine's actions out with a VMM, threads and channels.

mod guest;
mod links;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use vmferry_codec::{EncodedFrame, HotPages, PageHashes};
use vmferry_dirty::DirtyLog;
use vmferry_memory::{GuestMemory, PageSet};
use vmferry_transport::{Dialer, RateLimiter};
use vmferry_wire::Role;

use super::chooser::Chooser;
use super::connect;
use super::control::ControlLink;
use super::freed::Freed;
use super::io::{Action, Ending, Input, Report};
use super::lane::Lane;
use super::machine::Source;
use super::orders::Orders;
use super::pool::Pool;
use super::redial::Redialler;
use super::signal::Signal;
use super::window::Window;
use crate::compression::worker_threads;
use crate::config::{SourceConfig, window_frames};
use crate::cpu::CpuMeter;
use crate::error::MigrateError;
use crate::greeting::Purpose;
use crate::handover::SourceState;
use crate::held::{Committed, Paused, Running};
use crate::journal::{FileJournal, Journal, Record, Side, now_seconds};
use crate::stats::SourceStats;
use crate::vm::{SourceVm, VmError};

/// How a migration ended, seen from the source. In doubt is no ending: the migration then goes
/// on asking.
#[derive(Debug)]
pub enum SourceOutcome<V> {
    /// The guest runs here.
    Kept {
        /// The VMM.
        vm: V,
        /// Why it was not migrated.
        error: MigrateError,
        /// What was done until then.
        stats: Box<SourceStats>,
    },
    /// The guest is the destination's.
    Given {
        /// The VMM, paused for good, to be torn down.
        vm: V,
        /// What was done.
        stats: Box<SourceStats>,
    },
}

/// Migrates a guest to the destination that `dialer` reaches, on the calling thread.
///
/// `watch` is called with every report, between two steps; it should be quick. `orders` cancels
/// from other threads, and decides a hand-over that is in doubt.
pub fn migrate<V: SourceVm>(
    vm: V,
    dialer: &Dialer,
    config: SourceConfig,
    orders: &Orders,
    watch: &mut dyn FnMut(&Report),
) -> SourceOutcome<V> {
    if let Err(error) = config.check() {
        return SourceOutcome::Kept { vm, error: error.into(), stats: Box::default() };
    }
    let (cpu, conductor) = (CpuMeter::default(), CpuMeter::default());
    let guards = (cpu.count_this_thread(), conductor.count_this_thread());
    let mut driver = match Driver::connect(vm, dialer, config, orders, &cpu) {
        Ok(driver) => driver,
        Err((vm, error)) => {
            orders.detach();
            return SourceOutcome::Kept { vm, error: *error, stats: Box::default() };
        }
    };
    let ending = driver.run(watch);
    orders.detach();
    let (held, resume_failure, mut stats) = driver.finish();
    drop(guards);
    stats.engine_cpu_s = cpu.seconds();
    stats.planning_cpu_s += conductor.seconds();
    let stats = Box::new(stats);
    let vm = match held {
        Held::Running(running) => running.into_vm(),
        Held::Released(vm) => vm,
        Held::Paused(paused) => paused.into_vm().unwrap_or_else(gone),
        Held::Committed(_) | Held::Moving => gone(),
    };
    match (ending, resume_failure) {
        (Ending::Given, _) => SourceOutcome::Given { vm, stats },
        // That the guest stands still matters more than why it was not migrated.
        (Ending::Kept(_), Some(source)) => {
            let error = MigrateError::Vm { action: "resume the guest", source };
            SourceOutcome::Kept { vm, error, stats }
        }
        (Ending::Kept(error), None) => SourceOutcome::Kept { vm, error, stats },
    }
}

/// The hand-over's types leave no such end: it is either running, paused or released.
fn gone<V>() -> V {
    unreachable!("a migration ends with the guest in somebody's hands")
}

enum Held<V: SourceVm> {
    Running(Running<V>),
    Paused(Paused<V>),
    Committed(Committed<V>),
    Released(V),
    /// Within a change from one to the other.
    Moving,
}

struct Driver<'a, V: SourceVm> {
    machine: Source,
    held: Held<V>,
    config: SourceConfig,
    dialer: Dialer,
    orders: &'a Orders,
    started: Instant,
    memory: GuestMemory,
    log: Arc<dyn DirtyLog>,
    logging: bool,
    resume_failure: Option<VmError>,
    journal: FileJournal,
    control: ControlLink,
    inputs: (Sender<Input>, Receiver<Input>),
    /// What idle workers wait on.
    signal: Arc<Signal>,
    windows: Vec<Arc<Window<EncodedFrame>>>,
    pool: Option<Pool>,
    lanes: Vec<Lane>,
    redialler: Redialler,
    limiter: RateLimiter,
    chooser: Arc<Chooser>,
    hashes: Arc<PageHashes>,
    hot: Arc<HotPages>,
    /// What the present or next round sends.
    pending: Arc<PageSet>,
    /// What the round before sent, of which pages that are in the present one too go last.
    before: PageSet,
    last: Arc<PageSet>,
    /// Pages that need not be sent.
    freed: Freed,
    throttled: bool,
    /// The other set, so that no harvest allocates.
    spare: PageSet,
    /// The guest ran on after its last harvest: what is pending counts as written.
    recalled: bool,
    cpu: CpuMeter,
    transport: String,
}

impl<'a, V: SourceVm> Driver<'a, V> {
    /// Everything that can fail before the guest is touched.
    fn connect(
        vm: V,
        dialer: &Dialer,
        config: SourceConfig,
        orders: &'a Orders,
        cpu: &CpuMeter,
    ) -> Result<Self, (V, Box<MigrateError>)> {
        let inputs = crossbeam_channel::unbounded();
        if orders.attach(inputs.0.clone()) {
            let during = "the connection";
            return Err((vm, Box::new(MigrateError::Cancelled { during })));
        }
        orders.publish("connecting", SourceState::Holding);
        let made =
            connect::control(dialer, Purpose::control(Role::Control), config.timeouts.silence)
                .and_then(|channel| {
                    let mut journal = FileJournal::create(
                        &config.journal_directory,
                        config.session,
                        Side::Source,
                    )?;
                    journal.append(&Record::Open {
                        guest: vm.describe().identity,
                        peer: channel.transport.clone(),
                        peer_names: channel.peer_names.clone(),
                        at: now_seconds(),
                    })?;
                    Ok((channel, journal))
                });
        let (channel, journal) = match made {
            Ok(made) => made,
            Err(error) => return Err((vm, Box::new(error))),
        };
        let memory = vm.memory();
        let log = vm.dirty_log();
        let signal = Arc::new(Signal::default());
        let workers = worker_threads(config.compression.workers);
        let frames = window_frames(config.channels, workers, Duration::ZERO);
        let windows: Vec<_> = (0..config.channels)
            .map(|_| Arc::new(Window::new(frames, Arc::clone(&signal))))
            .collect();
        let mut machine = Source::new(config.clone(), vm.describe(), log.name(), Duration::ZERO);
        machine.expect_state(vm.state_estimate());
        let freed = Freed::new(vm.free_pages(), &memory, Arc::clone(&signal))
            .hinted_if(config.free_page_hints);
        let mut driver = Self {
            machine,
            held: Held::Running(Running::new(vm)),
            dialer: dialer.clone(),
            orders,
            started: Instant::now(),
            log,
            logging: false,
            resume_failure: None,
            journal,
            control: ControlLink::new(dialer, &config, windows.clone(), cpu.clone()),
            inputs,
            signal,
            windows,
            pool: None,
            lanes: Vec::new(),
            redialler: Redialler::new(dialer, config.timeouts),
            limiter: RateLimiter::new(config.max_bandwidth),
            chooser: Arc::new(Chooser::new(
                &config.compression,
                config.channels,
                config.max_bandwidth,
            )),
            hashes: Arc::new(PageHashes::for_memory(&memory)),
            hot: Arc::new(HotPages::new(config.compression.delta_memory)),
            pending: Arc::new(PageSet::for_memory(&memory)),
            spare: PageSet::for_memory(&memory),
            recalled: false,
            before: PageSet::for_memory(&memory),
            last: Arc::new(PageSet::for_memory(&memory)),
            freed,
            throttled: false,
            memory,
            cpu: cpu.clone(),
            transport: channel.transport.clone(),
            config,
        };
        if let Err(error) = driver.control.begin(channel) {
            let _ = driver.inputs.0.send(Input::LinkLost(error));
        }
        Ok(driver)
    }

    fn run(&mut self, watch: &mut dyn FnMut(&Report)) -> Ending {
        loop {
            while let Some(action) = self.machine.next_action() {
                self.orders.publish(self.machine.phase_name(), self.machine.handover());
                if let Action::Report(report) = &action {
                    if let Report::RoundStarted { round, pages, .. } = report {
                        self.orders.publish_round(*round, *pages);
                    }
                    watch(report);
                }
                if let Some(input) = self.execute(action) {
                    self.machine.handle(self.now(), input);
                }
            }
            if let Some(ending) = self.machine.ending() {
                return ending;
            }
            let input = self.await_input();
            self.machine.handle(self.now(), input);
        }
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn await_input(&mut self) -> Input {
        let tick = self.machine.next_tick().map(|at| self.started + at);
        let wait =
            tick.map_or(Duration::from_secs(1), |at| at.saturating_duration_since(Instant::now()));
        let wait = self.freed.review().map_or(wait, |period| wait.min(period));
        crossbeam_channel::select! {
            recv(self.control.heard()) -> from => {
                from.map_or(Input::Tick, |from| self.control.take_heard(from))
            }
            recv(self.inputs.1) -> input => match input {
                Ok(Input::LaneLost { lane, attempt, .. }) if !self.is_at(lane, attempt) => Input::Tick,
                Ok(input) => input,
                Err(_) => Input::Tick,
            },
            recv(self.control.dialled()) -> dialled => {
                dialled.map_or(Input::Tick, |dialled| self.control.take_dialled(dialled))
            }
            recv(self.redialler.dialled()) -> dialled => {
                dialled.map_or(Input::Tick, |dialled| self.rejoin(dialled))
            }
            default(wait) => Input::Tick,
        }
    }

    fn execute(&mut self, action: Action) -> Option<Input> {
        match action {
            Action::Send(message) => self.send(&message),
            Action::OpenLanes(token) => {
                Some(self.open_lanes(&token).map_or_else(Input::Failed, |()| Input::LanesJoined))
            }
            Action::ResumeControl { token, attempt, delay } => {
                self.control.resume(token, attempt, delay);
                None
            }
            Action::RejoinLane { lane, token, attempt, delay } => {
                self.redial(lane, token, attempt, delay);
                None
            }
            Action::Recall => self.recall(),
            Action::StartLog => Some(self.start_log().unwrap_or_else(Input::Failed)),
            Action::SendRound { round, rearm } => {
                self.send_round(round, rearm).err().map(Input::Failed)
            }
            Action::FitWindows { round_trip } => {
                let workers = worker_threads(self.config.compression.workers);
                let frames = window_frames(self.config.channels, workers, round_trip);
                self.windows.iter().for_each(|window| window.set_limit(frames));
                None
            }
            Action::Cap(cap) => {
                self.limiter.set_rate(cap);
                self.chooser.set_cap(cap);
                None
            }
            Action::Harvest => Some(self.harvest().unwrap_or_else(Input::Failed)),
            Action::Throttle { percent } => self.throttle(percent),
            Action::Pause => Some(self.pause()),
            Action::HarvestLast => Some(self.harvest_last().unwrap_or_else(Input::Failed)),
            Action::Save => Some(self.save()),
            Action::SumDigest => Some(Input::Digest(self.hashes.sum())),
            Action::TellFree => self.tell_free(),
            Action::Hash => self.hash(),
            Action::WriteCommit => Some(self.commit()),
            Action::WriteOutcome { kept, by_operator } => {
                let record =
                    if kept { Record::Kept { by_operator } } else { Record::Given { by_operator } };
                // The promise that counts is written already; this line is for `vmferry status`.
                let _ = self.journal.append(&record);
                None
            }
            Action::Resume => self.resume(),
            Action::Release => {
                self.held = match std::mem::replace(&mut self.held, Held::Moving) {
                    Held::Committed(committed) => Held::Released(committed.release()),
                    other => other,
                };
                None
            }
            Action::Ask { delay } => {
                self.control.ask(delay);
                None
            }
            Action::Report(_) => None,
        }
    }

    /// Stops everything and returns the guest with the figures.
    fn finish(mut self) -> (Held<V>, Option<VmError>, SourceStats) {
        self.control.stop_dialling();
        self.redialler.stop();
        if let Some(pool) = &self.pool {
            pool.close();
        }
        // A lane may be waiting for its share of a small bandwidth.
        self.limiter.close();
        if self.throttled
            && let Held::Running(running) = &mut self.held
            && let Err(error) = running.throttle(0)
        {
            self.resume_failure.get_or_insert(error);
        }
        if !matches!(self.held, Held::Released(_)) {
            self.freed.end();
        }
        if matches!(self.held, Held::Running(_)) && self.logging {
            // Taken from the log and perhaps not sent: whoever uses the log next must see them.
            self.log.give_back(&self.pending);
        }
        if self.logging {
            let _ = self.log.stop();
        }
        self.control.say_goodbye();
        self.lanes.iter().for_each(Lane::close);
        self.control.close();
        self.lanes.clear();
        self.pool = None;
        let mut stats = self.machine.stats().clone();
        stats.planning_cpu_s = self.chooser.planning().as_secs_f64();
        stats.transport = std::mem::take(&mut self.transport);
        let held = std::mem::replace(&mut self.held, Held::Moving);
        (held, self.resume_failure.take(), stats)
    }
}
