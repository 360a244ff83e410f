//! The source: its guest, its disk, and a process that drives the engine's machine.

mod guest_side;

use std::sync::Arc;
use std::time::Duration;

use vmferry::held::{Committed, Paused, Running};
use vmferry::journal::{Journal, Record};
use vmferry::link::{ControlReader, lost};
use vmferry::source::encode::PageEncoder;
use vmferry::source::io::{Action, Ending, Input, Report};
use vmferry::source::machine::Source;
use vmferry::source::plan::LanePlan;
use vmferry::{MigrateError, SourceConfig, SourceVm};
use vmferry_codec::{HotPages, PageHashes};
use vmferry_dirty::DirtyLog;
use vmferry_memory::{GuestMemory, PageSet, whole_hash};
use vmferry_wire::{
    ControlMessage, HELLO_REPLY_BYTES, Hello, HelloReply, HelloStatus, PROTOCOL_VERSION_MAX,
    PROTOCOL_VERSION_MIN, Role, SessionWord, Token,
};

use crate::disk::{Disk, SimJournal};
use crate::guest::{Guest, Vm};
use crate::network::{ChannelId, Event, Network};
use crate::plan::{Host, Sabotage};

/// How long a dialled host may not answer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Fewer copies of pages than the guest has hot ones, so that some are not held.
const HOT_BYTES: u64 = 32 * 4096;

/// How long a lost data channel may wait for the control channel to say why.
const EXPLANATION: Duration = Duration::from_millis(500);

/// The source's host.
pub struct SourceHost {
    /// The guest, which outlives the process.
    pub guest: Guest,
    disk: Disk,
    config: SourceConfig,
    process: Option<Process>,
    /// Counts the processes.
    number: u64,
    /// How the migration ended here, once it has.
    pub ended: Option<SourceEnd>,
    /// Whether the source was ever in doubt.
    pub was_in_doubt: bool,
    sabotage: Option<Sabotage>,
}

/// How the migration ended at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SourceEnd {
    /// The guest is the destination's.
    Given,
    /// The guest runs here.
    Kept,
}

struct Process {
    machine: Source,
    held: Held,
    memory: GuestMemory,
    log: Arc<dyn DirtyLog>,
    hashes: Arc<PageHashes>,
    pending: Arc<PageSet>,
    journal: Option<SimJournal>,
    /// The control channel, or the one on which it asks.
    control: Option<ChannelId>,
    /// The channel that is being dialled to ask, before it is greeted.
    dialled: Option<ChannelId>,
    questions: u64,
    /// How many lanes there are to be.
    channels: u8,
    lanes: Vec<ChannelId>,
    joined: usize,
    plans: Vec<LanePlan>,
    /// Frames sent, by lane.
    sequences: Vec<u64>,
    /// One worker for all lanes.
    encoder: PageEncoder,
}

enum Held {
    Running(Running<Vm>),
    Paused(Paused<Vm>),
    Committed(Committed<Vm>),
    Gone,
}

impl SourceHost {
    /// A host whose guest runs, and a process that is about to announce it on a greeted channel.
    pub fn new(
        guest: Guest,
        disk: Disk,
        config: SourceConfig,
        control: ChannelId,
        sabotage: Option<Sabotage>,
        network: &Network,
    ) -> Self {
        let mut host = Self {
            guest,
            disk,
            config,
            process: None,
            number: 0,
            ended: None,
            was_in_doubt: false,
            sabotage,
        };
        let vm = host.guest.attach();
        let journal = host.disk.create(host.config.session).and_then(|mut journal| {
            let guest = vm.describe().identity;
            let peer = "destination".to_owned();
            journal.append(&Record::Open { guest, peer, peer_names: Vec::new(), at: 0 })?;
            Ok(journal)
        });
        match journal {
            Ok(journal) => {
                let config = host.config.clone();
                let machine = Source::new(config, vm.describe(), "simulated", network.now());
                host.process = Some(Process::new(
                    machine,
                    vm,
                    Some(journal),
                    Some(control),
                    host.config.channels,
                ));
            }
            // Nothing was sent, and the guest was not touched.
            Err(_) => host.ended = Some(SourceEnd::Kept),
        }
        host
    }

    /// Whether a process lives, and is not done.
    pub fn is_busy(&self) -> bool {
        self.process.is_some()
    }

    /// When the machine wants to be told the time.
    pub fn next_tick(&self) -> Option<Duration> {
        if self.sabotage == Some(Sabotage::NoClock) {
            return None;
        }
        self.process.as_ref().and_then(|process| process.machine.next_tick())
    }

    /// What the migration is doing.
    pub fn phase(&self) -> &'static str {
        self.process.as_ref().map_or("nothing", |process| process.machine.phase_name())
    }

    /// The process dies. The guest does not. One that had kept its guest and was done is read from
    /// its journal again as well: whoever starts next does not know that it was done.
    pub fn crash(&mut self, network: &mut Network) {
        self.guest.detach(false);
        self.ended = self.ended.filter(|ended| *ended == SourceEnd::Given);
        if let Some(process) = self.process.take() {
            process.close(network);
        }
    }

    /// A process is started again beside the guest and reads the journal.
    pub fn restart(&mut self, network: &mut Network) {
        if self.process.is_some() || self.ended.is_some() {
            return;
        }
        self.number += 1;
        let vm = self.guest.attach();
        let (journal, records) = match self.disk.reopen(self.config.session) {
            Ok(Some((journal, records))) => (Some(journal), records),
            Ok(None) => (None, Vec::new()),
            Err(error) => panic!("the simulated disk never damages a whole line: {error}"),
        };
        network.note(|| format!("source: restarts with {records:?}"));
        let config = self.config.clone();
        let now = network.now();
        let machine = Source::recovered(config, &vm.describe(), "simulated", &records, now);
        let mut process = Process::new(machine, vm, journal, None, self.config.channels);
        process.held = process.held.recover(&process.machine, &self.guest);
        self.process = Some(process);
        self.pump(network);
    }

    /// Something happened.
    pub fn input(&mut self, number: u64, input: Input, network: &mut Network) {
        if number == self.number
            && let Some(process) = &mut self.process
        {
            process.machine.handle(network.now(), input);
            self.pump(network);
        }
    }

    /// Time has passed, or the user wants something.
    pub fn tell(&mut self, input: Input, network: &mut Network) {
        self.input(self.number, input, network);
    }

    /// Bytes have arrived.
    pub fn deliver(&mut self, channel: ChannelId, bytes: &[u8], network: &mut Network) {
        let Some(process) = &mut self.process else { return };
        if process.lanes.contains(&channel) {
            let input = process.joined(bytes);
            if let Some(input) = input {
                self.tell(input, network);
            }
            return;
        }
        if process.dialled == Some(channel) {
            process.dialled = None;
            match greeted(bytes) {
                Ok(()) => {
                    process.control = Some(channel);
                    let session = self.config.session;
                    send(network, channel, &ControlMessage::Query { session });
                }
                Err(error) => self.tell(Input::LinkLost(error), network),
            }
            return;
        }
        if process.control != Some(channel) {
            return;
        }
        let input = match ControlReader::new(bytes).receive("waiting for the destination") {
            Ok(message) => Input::Control(self.sabotaged(message)),
            Err(error @ MigrateError::Protocol { .. }) => Input::Failed(error),
            Err(error) => Input::LinkLost(error),
        };
        self.tell(input, network);
    }

    fn sabotaged(&self, message: ControlMessage) -> ControlMessage {
        match message {
            ControlMessage::Answer { session, word: SessionWord::Unknown }
                if self.sabotage == Some(Sabotage::UnknownIsAborted) =>
            {
                ControlMessage::Answer { session, word: SessionWord::Aborted }
            }
            message => message,
        }
    }

    /// A channel has ended.
    pub fn closed(&mut self, channel: ChannelId, network: &mut Network) {
        let Some(process) = &mut self.process else { return };
        if self.sabotage == Some(Sabotage::NoClock) {
            return;
        }
        let end = |name: &str| {
            lost(name, process.machine.phase_name(), &std::io::ErrorKind::UnexpectedEof.into())
        };
        if let Some(lane) = process.lanes.iter().position(|lane| *lane == channel) {
            // As the driver does: the control channel may say why.
            let error = end(&format!("lane {lane}"));
            let event = Event::Source(self.number, Input::LinkLost(error));
            network.after(EXPLANATION, event);
        } else if process.control == Some(channel) || process.dialled == Some(channel) {
            let error = end("control");
            process.control = None;
            process.dialled = None;
            self.tell(Input::LinkLost(error), network);
        }
    }

    /// Dials the destination to ask for its word.
    pub fn ask(
        &mut self,
        number: u64,
        question: u64,
        destination_listens: bool,
        network: &mut Network,
    ) -> Option<ChannelId> {
        let process = self.process.as_mut()?;
        if number != self.number || question != process.questions {
            return None;
        }
        if network.is_stranger() {
            let session = self.config.session;
            let message = ControlMessage::Answer { session, word: SessionWord::Unknown };
            let input = Input::Control(self.sabotaged(message));
            network.after(Duration::from_millis(2), Event::Source(self.number, input));
            return None;
        }
        if !network.reaches() || !destination_listens {
            let error = MigrateError::TimedOut { what: "a connection", after: CONNECT_TIMEOUT };
            let wait = if network.reaches() { Duration::from_millis(1) } else { CONNECT_TIMEOUT };
            network.after(wait, Event::Source(self.number, Input::LinkLost(error)));
            return None;
        }
        let channel = network.open();
        process.dialled = Some(channel);
        network.send(channel, Host::Destination, "greeting", hello(Role::Query, 0, Token([0; 16])));
        Some(channel)
    }

    fn pump(&mut self, network: &mut Network) {
        loop {
            let Some(process) = &mut self.process else { return };
            let Some(action) = process.machine.next_action() else { break };
            if let Action::Report(Report::InDoubt { .. }) = &action {
                self.was_in_doubt = true;
            }
            network.note(|| format!("source: {}", brief(&format!("{action:?}"))));
            let input = process.execute(action, self.number, &self.guest, network);
            if self.disk.takes_the_process_along() {
                network.note(|| "source: dies with its write".into());
                self.crash(network);
                network.after(Duration::from_secs(3), Event::Restart(Host::Source));
                return;
            }
            if let (Some(input), Some(process)) = (input, &mut self.process) {
                process.machine.handle(network.now(), input);
            }
        }
        let Some(process) = &mut self.process else { return };
        if let Some(ending) = process.machine.ending() {
            network.note(|| format!("source: ended {ending:?}"));
            self.ended = Some(match ending {
                Ending::Given => SourceEnd::Given,
                Ending::Kept(_) => SourceEnd::Kept,
            });
            if let Some(process) = self.process.take() {
                process.close(network);
            }
        }
    }
}

impl Process {
    fn new(
        machine: Source,
        vm: Vm,
        journal: Option<SimJournal>,
        control: Option<ChannelId>,
        channels: u8,
    ) -> Self {
        let memory = vm.memory();
        let hashes = Arc::new(PageHashes::for_memory(&memory));
        let hot = Arc::new(HotPages::new(HOT_BYTES));
        let encoder = PageEncoder::new(memory.clone(), Arc::clone(&hashes), vm.compressors(), hot);
        Self {
            machine,
            log: vm.dirty_log(),
            held: Held::Running(Running::new(vm)),
            hashes,
            pending: Arc::new(PageSet::for_memory(&memory)),
            memory,
            journal,
            control,
            dialled: None,
            questions: 0,
            channels,
            lanes: Vec::new(),
            joined: 0,
            plans: Vec::new(),
            sequences: Vec::new(),
            encoder,
        }
    }

    fn close(self, network: &mut Network) {
        for channel in self.lanes.iter().chain(&self.control).chain(&self.dialled) {
            network.close(*channel, Host::Source);
        }
    }

    fn execute(
        &mut self,
        action: Action,
        number: u64,
        guest: &Guest,
        network: &mut Network,
    ) -> Option<Input> {
        match action {
            Action::Send(message) => {
                let sent = self.control.is_some_and(|channel| send(network, channel, &message));
                let phase = self.machine.phase_name();
                let end = || lost("control", phase, &std::io::ErrorKind::BrokenPipe.into());
                (!sent && !self.machine.handover().is_final()).then(|| Input::LinkLost(end()))
            }
            Action::OpenLanes(token) => {
                self.open_lanes(token, network);
                None
            }
            Action::StartLog => Some(self.start_log().unwrap_or_else(Input::Failed)),
            Action::SendRound { round, rearm } => {
                self.send_round(round, rearm, number, guest, network)
            }
            Action::Harvest => {
                let writes = network.rng.usize(..30);
                guest.work(&mut network.rng, writes);
                let mut pages = PageSet::for_memory(&self.memory);
                let took = Duration::from_micros(200);
                Some(self.log.collect(&mut pages).map_or_else(
                    |error| Input::Failed(error.into()),
                    |()| {
                        self.pending = Arc::new(pages);
                        Input::Harvested {
                            pages: self.pending.count(),
                            took,
                            stood_still: Duration::ZERO,
                        }
                    },
                ))
            }
            Action::Throttle { .. } | Action::Cap(_) => None,
            Action::ResumeControl { .. } | Action::RejoinLane { .. } | Action::Recall => {
                unreachable!("the simulated source has no time to make a link again")
            }
            Action::Pause => Some(self.pause()),
            Action::HarvestLast => Some(self.harvest_last().unwrap_or_else(Input::Failed)),
            Action::Save => {
                let Held::Paused(paused) = &mut self.held else { return None };
                let took = Duration::from_micros(100);
                Some(paused.save().map_or_else(
                    |source| Input::Failed(MigrateError::Vm { action: "save its state", source }),
                    |state| Input::Saved { state, took },
                ))
            }
            Action::SumDigest => Some(Input::Digest(self.hashes.sum())),
            Action::Hash => {
                let input = whole_hash(&self.memory)
                    .map_or_else(|error| Input::Failed(error.into()), Input::Hashed);
                let takes = Duration::from_millis(network.rng.u64(1..2_000));
                network.after(takes, Event::Source(number, input));
                None
            }
            Action::WriteCommit => Some(self.commit()),
            Action::WriteOutcome { kept, by_operator } => {
                if let Some(journal) = &mut self.journal {
                    // The promise that counts is written already.
                    let _ = journal.append(&if kept {
                        Record::Kept { by_operator }
                    } else {
                        Record::Given { by_operator }
                    });
                }
                None
            }
            Action::Resume => {
                self.resume();
                None
            }
            Action::Release => {
                self.held = match std::mem::replace(&mut self.held, Held::Gone) {
                    Held::Committed(committed) => {
                        committed.release();
                        Held::Gone
                    }
                    other => other,
                };
                None
            }
            Action::Ask { delay } => {
                if let Some(channel) = self.control.take().or(self.dialled.take()) {
                    network.close(channel, Host::Source);
                }
                self.questions += 1;
                network.after(delay, Event::Ask { process: number, question: self.questions });
                None
            }
            Action::Report(_) => None,
        }
    }

    fn open_lanes(&mut self, token: Token, network: &mut Network) {
        let lanes = self.channels;
        for lane in 0..lanes {
            let channel = network.open();
            network.send(channel, Host::Destination, "greeting", hello(Role::Data, lane, token));
            self.lanes.push(channel);
            self.sequences.push(0);
            self.plans.push(LanePlan::new(lane, lanes, Arc::clone(&self.log)));
        }
    }

    /// A data channel was greeted.
    fn joined(&mut self, bytes: &[u8]) -> Option<Input> {
        if let Err(error) = greeted(bytes) {
            return Some(Input::Failed(error));
        }
        self.joined += 1;
        (self.joined == self.lanes.len()).then_some(Input::LanesJoined)
    }
}

fn send(network: &mut Network, channel: ChannelId, message: &ControlMessage) -> bool {
    let mut bytes = Vec::new();
    message.encode(&mut bytes);
    network.send(channel, Host::Destination, message.name(), bytes)
}

fn hello(role: Role, lane: u8, token: Token) -> Vec<u8> {
    let (version_min, version_max) = (PROTOCOL_VERSION_MIN, PROTOCOL_VERSION_MAX);
    Hello { version_min, version_max, role, lane, token, attempt: 0 }.encode().to_vec()
}

fn greeted(bytes: &[u8]) -> Result<(), MigrateError> {
    let protocol =
        |reason: String| MigrateError::Protocol { channel: "greeting".into(), offset: 0, reason };
    let bytes: &[u8; HELLO_REPLY_BYTES] =
        bytes.try_into().map_err(|_| protocol("the reply is cut off".into()))?;
    let reply = HelloReply::parse(bytes).map_err(|error| protocol(error.to_string()))?;
    match reply.status {
        HelloStatus::Ok => Ok(()),
        status => Err(protocol(format!("the destination answers {status:?}"))),
    }
}

/// A line of a trace.
pub fn brief(text: &str) -> String {
    text.chars().take(120).collect()
}
