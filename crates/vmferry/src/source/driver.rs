//! The driver of the source: carries the machine's actions out with a VMM, threads and channels.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use vmferry_codec::PageHashes;
use vmferry_dirty::DirtyLog;
use vmferry_memory::{GuestMemory, PageSet, whole_hash};
use vmferry_transport::{ChannelCloser, ChannelReader, ChannelWriter, Dialer, RateLimiter};
use vmferry_wire::{ControlMessage, Role, Token};

use super::connect::{self, ControlChannel, FromLink};
use super::io::{Action, Ending, Input, Report};
use super::lane::{FrameBuffer, Lane, LaneContext};
use super::machine::Source;
use super::orders::Orders;
use super::window::Window;
use crate::config::{SourceConfig, window_frames};
use crate::cpu::CpuMeter;
use crate::error::MigrateError;
use crate::handover::SourceState;
use crate::held::{Committed, Paused, Running, returned, write_commit};
use crate::journal::{FileJournal, Journal, Record, Side, now_seconds};
use crate::link::{ControlWriter, lost};
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
    let cpu = CpuMeter::default();
    let guard = cpu.count_this_thread();
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
    drop(guard);
    stats.engine_cpu_s = cpu.seconds();
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
    /// A data channel that is gone, and since when.
    lane_loss: Option<(Instant, MigrateError)>,
    journal: FileJournal,
    /// The control channel in use and its number.
    control: Option<(ControlWriter<ChannelWriter>, ChannelCloser)>,
    link: u64,
    link_inputs: (Sender<FromLink>, Receiver<FromLink>),
    inputs: (Sender<Input>, Receiver<Input>),
    asking: Option<Sender<()>>,
    asked: (Sender<Asked>, Receiver<Asked>),
    windows: Vec<Arc<Window<FrameBuffer>>>,
    lanes: Vec<Lane>,
    /// Kept open until the end: a data channel closed early would look like a lost link.
    lane_ends: Vec<(ChannelReader, ChannelCloser)>,
    hashes: Arc<PageHashes>,
    /// What the present or next round sends.
    pending: Arc<PageSet>,
    /// The other set, so that no harvest allocates.
    spare: PageSet,
    cpu: CpuMeter,
    transport: String,
}

struct Asked {
    link: u64,
    channel: Result<ControlChannel, MigrateError>,
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
            connect::control(dialer, Role::Control, config.timeouts.silence).and_then(|channel| {
                let mut journal =
                    FileJournal::create(&config.journal_directory, config.session, Side::Source)?;
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
        let windows: Vec<_> = (0..config.channels)
            .map(|_| Arc::new(Window::new(window_frames(config.channels))))
            .collect();
        let machine = Source::new(config.clone(), vm.describe(), log.name(), Duration::ZERO);
        let mut driver = Self {
            machine,
            held: Held::Running(Running::new(vm)),
            dialer: dialer.clone(),
            orders,
            started: Instant::now(),
            log,
            logging: false,
            resume_failure: None,
            lane_loss: None,
            journal,
            control: None,
            link: 0,
            link_inputs: crossbeam_channel::unbounded(),
            inputs,
            asking: None,
            asked: crossbeam_channel::unbounded(),
            windows,
            lanes: Vec::new(),
            lane_ends: Vec::new(),
            hashes: Arc::new(PageHashes::for_memory(&memory)),
            pending: Arc::new(PageSet::for_memory(&memory)),
            spare: PageSet::for_memory(&memory),
            memory,
            cpu: cpu.clone(),
            transport: channel.transport.clone(),
            config,
        };
        driver.use_control(channel);
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
            recv(self.link_inputs.1) -> from => match from {
                Ok(from) if from.link == self.link => from.input,
                _ => Input::Tick,
            },
            recv(self.inputs.1) -> input => match input {
                Ok(Input::LaneLost(error)) => {
                    self.lane_loss.get_or_insert((now, error));
                    Input::Tick
                }
                Ok(input) => input,
                Err(_) => Input::Tick,
            },
            recv(self.asked.1) -> asked => match asked {
                Ok(Asked { link, channel }) if link == self.link => match channel {
                    Ok(channel) => {
                        self.use_control(channel);
                        Input::Tick
                    }
                    Err(error) => Input::LinkLost(error),
                },
                _ => Input::Tick,
            },
            default(wait) => Input::Tick,
        }
    }

    fn use_control(&mut self, channel: ControlChannel) {
        self.link += 1;
        let (link, inputs) = (self.link, self.link_inputs.0.clone());
        let windows = self.windows.clone();
        let cpu = self.cpu.clone();
        let reader = channel.reader;
        let spawned = std::thread::Builder::new().name("control-read".into()).spawn(move || {
            let _cpu = cpu.count_this_thread();
            connect::read_control(reader, link, &windows, &inputs);
        });
        if let Err(source) = spawned {
            let error = MigrateError::Local { action: "start a thread", source };
            let _ = self.inputs.0.send(Input::LinkLost(error));
        }
        self.control = Some((channel.writer, channel.closer));
    }

    fn execute(&mut self, action: Action) -> Option<Input> {
        match action {
            Action::Send(message) => self.send(&message),
            Action::OpenLanes(token) => {
                Some(self.open_lanes(&token).map_or_else(Input::Failed, |()| Input::LanesJoined))
            }
            Action::StartLog => Some(self.start_log().unwrap_or_else(Input::Failed)),
            Action::SendRound { round, rearm } => {
                for lane in &self.lanes {
                    lane.send_round(round, rearm, Arc::clone(&self.pending));
                }
                None
            }
            Action::Harvest => Some(
                self.harvest()
                    .map_or_else(Input::Failed, |(pages, took)| Input::Harvested { pages, took }),
            ),
            Action::Pause => Some(self.pause()),
            Action::HarvestLast => Some(self.harvest_last().unwrap_or_else(Input::Failed)),
            Action::Save => Some(self.save()),
            Action::SumDigest => Some(Input::Digest(self.hashes.sum())),
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
                self.ask(delay);
                None
            }
            Action::Report(_) => None,
        }
    }

    fn send(&mut self, message: &ControlMessage) -> Option<Input> {
        let (writer, _) = self.control.as_ref()?;
        match writer.send(message) {
            Ok(()) => None,
            // A source that keeps its guest owes the peer no more than the attempt.
            Err(_) if self.machine.handover().is_final() => None,
            Err(error) => {
                let error = lost("control", self.machine.phase_name(), &error);
                Some(Input::LinkLost(error))
            }
        }
    }

    fn open_lanes(&mut self, token: &Token) -> Result<(), MigrateError> {
        let limiter = RateLimiter::new(self.config.max_bandwidth);
        let context = LaneContext {
            memory: self.memory.clone(),
            log: Arc::clone(&self.log),
            hashes: Arc::clone(&self.hashes),
            limiter,
            results: self.inputs.0.clone(),
            cpu: self.cpu.clone(),
            lanes: self.config.channels,
            sent_bytes: self.orders.sent_bytes(),
        };
        for (lane, window) in (0..self.config.channels).zip(&self.windows) {
            let timeouts = &self.config.timeouts;
            let (writer, reader, closer) =
                connect::data(&self.dialer, lane, *token, timeouts.silence, timeouts.stall)?;
            let lane = Lane::start(lane, &context, Arc::clone(window), writer)
                .map_err(|source| MigrateError::Local { action: "start a thread", source })?;
            self.lanes.push(lane);
            self.lane_ends.push((reader, closer));
        }
        Ok(())
    }

    /// Logging first, then the populated pages: a page populated in between is in the log.
    fn start_log(&mut self) -> Result<Input, MigrateError> {
        self.log.start()?;
        self.logging = true;
        self.pending = Arc::new(self.memory.populated()?);
        Ok(Input::LogStarted { populated_pages: self.pending.count() })
    }

    /// Harvests into the spare set and makes it the pending one.
    fn harvest(&mut self) -> Result<(u64, Duration), MigrateError> {
        let begun = Instant::now();
        self.spare.clear_all();
        self.log.collect(&mut self.spare)?;
        let took = begun.elapsed();
        if let Some(pending) = Arc::get_mut(&mut self.pending) {
            std::mem::swap(pending, &mut self.spare);
        } else {
            let fresh = PageSet::for_memory(&self.memory);
            self.pending = Arc::new(std::mem::replace(&mut self.spare, fresh));
        }
        Ok((self.pending.count(), took))
    }

    /// Adds what was written before the pause to what the last harvest found.
    fn harvest_last(&mut self) -> Result<Input, MigrateError> {
        let begun = Instant::now();
        let mut pages = std::mem::replace(&mut self.spare, PageSet::for_memory(&self.memory));
        pages.clear_all();
        pages.union_with(&self.pending);
        self.log.collect(&mut pages)?;
        self.pending = Arc::new(pages);
        Ok(Input::LastHarvest { pages: self.pending.count(), took: begun.elapsed() })
    }

    fn pause(&mut self) -> Input {
        let begun = Instant::now();
        let (held, input) = match std::mem::replace(&mut self.held, Held::Moving) {
            Held::Running(running) => match running.pause() {
                Ok(paused) => (Held::Paused(paused), Input::Paused { took: begun.elapsed() }),
                Err((running, source)) => {
                    let error = MigrateError::Vm { action: "pause the guest", source };
                    (Held::Running(running), Input::Failed(error))
                }
            },
            other => (other, Input::Tick),
        };
        self.held = held;
        input
    }

    fn save(&mut self) -> Input {
        let begun = Instant::now();
        let Held::Paused(paused) = &mut self.held else { return Input::Tick };
        match paused.save() {
            Ok(state) => Input::Saved { state, took: begun.elapsed() },
            Err(source) => Input::Failed(MigrateError::Vm { action: "save its state", source }),
        }
    }

    fn hash(&mut self) -> Option<Input> {
        let (memory, results) = (self.memory.clone(), self.inputs.0.clone());
        let spawned = std::thread::Builder::new().name("verify".into()).spawn(move || {
            let _ = results.send(
                whole_hash(&memory).map_or_else(|error| Input::Failed(error.into()), Input::Hashed),
            );
        });
        spawned
            .err()
            .map(|source| Input::Failed(MigrateError::Local { action: "start a thread", source }))
    }

    fn commit(&mut self) -> Input {
        match write_commit(&mut self.journal) {
            Ok(proof) => {
                self.held = match std::mem::replace(&mut self.held, Held::Moving) {
                    Held::Paused(paused) => {
                        paused.commit(proof).map_or(Held::Moving, Held::Committed)
                    }
                    other => other,
                };
                Input::CommitWritten(Ok(()))
            }
            Err(error) => Input::CommitWritten(Err(error.into())),
        }
    }

    fn resume(&mut self) -> Option<Input> {
        let paused = match std::mem::replace(&mut self.held, Held::Moving) {
            Held::Paused(paused) => paused,
            Held::Committed(committed) => match returned(self.machine.handover()) {
                Some(proof) => committed.take_back(proof),
                None => {
                    self.held = Held::Committed(committed);
                    return None;
                }
            },
            other => {
                self.held = other;
                return None;
            }
        };
        // A VMM that can't resume once may do so when asked again: the guest's life hangs on it.
        let mut attempt = Some(paused);
        for _ in 0..RESUME_ATTEMPTS {
            let Some(paused) = attempt.take() else { break };
            match paused.resume() {
                Ok(running) => {
                    self.held = Held::Running(running);
                    self.resume_failure = None;
                    return None;
                }
                Err((again, error)) => {
                    attempt = again;
                    self.resume_failure = Some(error);
                }
            }
        }
        if let Some(paused) = attempt {
            self.held = Held::Paused(paused);
        }
        None
    }

    fn ask(&mut self, delay: Duration) {
        if let Some((_, closer)) = self.control.take() {
            closer.close();
        }
        self.link += 1;
        let (stop, stopped) = crossbeam_channel::bounded(1);
        self.asking = Some(stop);
        let (dialer, answers, link) = (self.dialer.clone(), self.asked.0.clone(), self.link);
        let (session, silence) = (self.config.session, self.config.timeouts.silence);
        let spawned = std::thread::Builder::new().name("ask".into()).spawn(move || {
            if let Some(channel) = connect::ask(&dialer, session, delay, silence, &stopped) {
                let _ = answers.send(Asked { link, channel });
            }
        });
        if let Err(source) = spawned {
            let channel = Err(MigrateError::Local { action: "start a thread", source });
            let _ = self.asked.0.send(Asked { link, channel });
        }
    }

    /// Lets the last message reach the destination: a channel closed while it still speaks would
    /// be reset, and what was sent before lost with it. The guest runs meanwhile.
    fn say_goodbye(&mut self) {
        let Some((writer, _)) = &self.control else { return };
        if writer.finish().is_err() {
            return;
        }
        let deadline = Instant::now() + LAST_WORDS;
        while let Ok(from) = self.link_inputs.1.recv_deadline(deadline) {
            if from.link == self.link && matches!(from.input, Input::LinkLost(_) | Input::Failed(_))
            {
                return;
            }
        }
    }

    /// Stops everything and returns the guest with the figures.
    fn finish(mut self) -> (Held<V>, Option<VmError>, SourceStats) {
        drop(self.asking.take());
        for window in &self.windows {
            window.close();
        }
        if matches!(self.held, Held::Running(_)) && self.logging {
            // Taken from the log and perhaps not sent: whoever uses the log next must see them.
            self.log.give_back(&self.pending);
        }
        if self.logging {
            let _ = self.log.stop();
        }
        self.say_goodbye();
        for (_, closer) in &self.lane_ends {
            closer.close();
        }
        if let Some((_, closer)) = &self.control {
            closer.close();
        }
        for lane in self.lanes.drain(..) {
            lane.join();
        }
        let mut stats = self.machine.stats().clone();
        stats.transport = std::mem::take(&mut self.transport);
        let held = std::mem::replace(&mut self.held, Held::Moving);
        (held, self.resume_failure.take(), stats)
    }
}

/// How long a lost data channel may wait for the control channel to say why.
const EXPLANATION: Duration = Duration::from_millis(500);

/// How long a finished migration waits for the destination to hear its last message and hang up.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Attempts to resume a guest before its VMM is believed to be broken.
const RESUME_ATTEMPTS: u32 = 3;
