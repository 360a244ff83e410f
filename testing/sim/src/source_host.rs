//! The source: its guest, its disk, and a process that drives the engine's machine.

mod dialing;
mod fetch;
mod guest_side;
mod lanes;
mod link_record;
mod process;

use std::time::Duration;

use vmferry::link::{ControlReader, Speaker, lost};
use vmferry::machine::peer::SourceSide;
use vmferry::machine::source::Source;
use vmferry::machine::source::io::{Action, Ending, Input, Report};
use vmferry::{MigrateError, SourceConfig, SourceVm};
use vmferry_handover::journal::{Record, witness_of};
use vmferry_handover::{Register, SourceState};
use vmferry_wire::{ControlMessage, Role, SessionWord, Token};

use self::link_record::LinkRecord;
use self::process::{Process, Start};
use crate::absence::Absence;
use crate::disk::{Disk, SimJournal};
use crate::guest::{Guest, Vm};
use crate::host::Host;
use crate::hostile::forge;
use crate::network::{ChannelId, Event, Network};
use crate::plan::{Sabotage, Step};
use crate::witness::witness_id;

/// The source's host.
pub struct SourceHost {
    /// The guest, which outlives the process.
    pub guest: Guest,
    disk: Disk,
    config: SourceConfig,
    process: Option<Process>,
    /// The number of processes so far.
    number: u64,
    /// The end of the migration at this host, if it has ended.
    pub ended: Option<SourceEnd>,
    /// Whether the source was ever in doubt.
    pub was_in_doubt: bool,
    /// Whether it was in doubt because of silence.
    pub doubted_silence: bool,
    /// What it knows about its channels.
    pub links: LinkRecord,
    sabotage: Option<Sabotage>,
    /// How often a restarted process was to serve pages.
    pub served_again: u64,
    /// Slow steps of its process.
    pub absence: Absence<Input>,
}

/// The end of the migration at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SourceEnd {
    /// The guest belongs to the destination.
    Given,
    /// The guest runs here.
    Kept,
}

impl SourceHost {
    /// A host whose guest runs, and a process that is about to announce the guest on a greeted
    /// channel.
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
            doubted_silence: false,
            links: LinkRecord::default(),
            served_again: 0,
            sabotage,
            absence: Absence::new(Host::Source, sabotage),
        };
        let vm = host.guest.attach();
        let witness = network.witness.is_some().then(witness_id);
        match host.disk.create(host.config.session, "destination", witness.clone()) {
            Ok(journal) => {
                let config = host.config.clone();
                let protocol = network.protocol;
                let our_side = SourceSide { witness, protocol, ..SourceSide::new("simulated") };
                let machine = Source::new(config, vm.describe(), our_side, network.now());
                host.process = Some(Process::new(Start {
                    number: host.number,
                    machine,
                    vm,
                    journal: Some(journal),
                    control: Some(control),
                    config: host.config.clone(),
                    sabotage,
                }));
            }
            // Nothing was sent, and the guest was not touched.
            Err(_) => host.ended = Some(SourceEnd::Kept),
        }
        host
    }

    /// Whether a process lives and has not ended its migration.
    pub fn is_busy(&self) -> bool {
        self.process.is_some()
    }

    /// When the machine next needs a tick.
    pub fn next_tick(&self) -> Option<Duration> {
        if self.sabotage == Some(Sabotage::NoClock) || self.absence.is_away() {
            return None;
        }
        self.process.as_ref().and_then(|process| process.machine.next_tick())
    }

    /// Whether it is in doubt.
    pub fn is_in_doubt(&self) -> bool {
        self.process.as_ref().is_some_and(|process| {
            matches!(process.machine.handover(), SourceState::InDoubt { .. })
        })
    }

    /// The phase of the migration.
    pub fn phase(&self) -> &'static str {
        self.process.as_ref().map_or("nothing", |process| process.machine.phase_name())
    }

    /// Whether this host's guest is paused although the source knows that the link is down. A
    /// process in a slow step can't resume it yet.
    pub fn lets_the_guest_wait(&self) -> bool {
        let holds = |process: &Process| process.machine.handover() == SourceState::Holding;
        !self.links.away.is_empty()
            && !self.absence.is_away()
            && self.process.as_ref().is_some_and(holds)
            && !self.guest.is_running()
    }

    /// The process dies; the guest does not. If the process had kept its guest and ended, the next
    /// one still reads the journal, because it does not know that.
    pub fn crash(&mut self, network: &mut Network) {
        self.guest.detach(false);
        self.absence.forget();
        self.ended = self.ended.filter(|ended| *ended == SourceEnd::Given);
        // The next process does not know any channels.
        self.links.away.clear();
        if let Some(process) = self.process.take() {
            process.close(network);
        }
    }

    /// Starts a process again next to the guest; it reads the journal. If the guest is there, its
    /// user tries once more.
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
        // A session whose journal says how it ended is not continued.
        self.ended = records.iter().find_map(|record| match record {
            Record::Kept { .. } => Some(SourceEnd::Kept),
            Record::Given { .. } => Some(SourceEnd::Given),
            _ => None,
        });
        if self.ended.is_none() {
            self.take_up(vm, journal, &records, network);
        }
        if self.ended == Some(SourceEnd::Kept) && network.reaches() && !network.is_away() {
            let newcomer = network.open();
            let hello = dialing::hello(Role::Control, 0, Token([0; 16]));
            network.send(newcomer, Host::Destination, "greeting", hello);
        }
    }

    /// Continues the session in a restarted process.
    fn take_up(
        &mut self,
        vm: Vm,
        journal: Option<SimJournal>,
        records: &[Record],
        network: &mut Network,
    ) {
        let config = self.config.clone();
        let now = network.now();
        let our_side = SourceSide::recovered(false, witness_of(records).cloned());
        let machine = Source::recovered(config, &vm.describe(), our_side, records, now);
        self.served_again += u64::from(machine.handover() == SourceState::Serving);
        let mut process = Process::new(Start {
            number: self.number,
            machine,
            vm,
            journal,
            control: None,
            config: self.config.clone(),
            sabotage: self.sabotage,
        });
        process.recover(&self.guest);
        self.process = Some(process);
        self.pump(network);
    }

    /// Passes an input to the machine.
    pub fn input(&mut self, number: u64, input: Input, network: &mut Network) {
        if number != self.number {
            return;
        }
        let Some(process) = &mut self.process else { return };
        let input = match input {
            Input::Register(Err(_)) if self.sabotage == Some(Sabotage::TakeBackUnanswered) => {
                Input::Register(Ok(Register::TakenBack))
            }
            input => input,
        };
        if let Input::LaneLost { lane, attempt, .. } = &input
            && !process.is_at(*lane, *attempt)
        {
            return;
        }
        if let Input::Control(ControlMessage::Placed { lane, sequence }) = &input {
            process.placed(*lane, *sequence);
        }
        process.machine.handle(network.now(), input);
        self.pump(network);
    }

    /// Ends a slow step. Returns the events that arrived meanwhile.
    pub fn step_ended(&mut self, process: u64, network: &mut Network) -> Vec<Event> {
        let Some(back) = self.absence.end(process, network.now()) else { return Vec::new() };
        if let Some(process) = &mut self.process {
            if self.sabotage != Some(Sabotage::CountOwnTime) {
                process.machine.handle(network.now(), Input::Away { took: back.took });
            }
            if let Some(result) = back.result {
                process.machine.handle(network.now(), result);
            }
        }
        self.pump(network);
        back.heard
    }

    /// The process's other thread checks whether to send a keepalive.
    pub fn sign_of_life(&self, process: u64, network: &mut Network) {
        if self.absence.says_that_it_lives(process, network)
            && let Some(control) = self.process.as_ref().and_then(|process| process.control)
        {
            network.say(control, Host::Destination, &ControlMessage::Ping { nonce: 0 });
        }
    }

    /// Passes the time or a user's request to the machine.
    pub fn tell(&mut self, input: Input, network: &mut Network) {
        if self.absence.is_away() && matches!(input, Input::Tick) {
            return;
        }
        self.input(self.number, input, network);
    }

    /// Bytes have arrived.
    pub fn deliver(&mut self, channel: ChannelId, bytes: &[u8], network: &mut Network) {
        let Some(process) = &mut self.process else { return };
        let inputs = if process.is_dialing(channel) {
            process.dialed(channel, bytes, network)
        } else if let Some(lane) = process.lane_of(channel) {
            process.heard_on_lane(lane, bytes)
        } else if let Some(lane) = process.fetch.lane_of(channel) {
            process.heard_on_fetch_lane(lane, bytes, network)
        } else if process.control == Some(channel) {
            vec![match ControlReader::new(bytes, network.protocol, Speaker::Destination)
                .receive("waiting for the destination")
            {
                Ok(message) => Input::Control(self.sabotaged(message)),
                Err(error @ MigrateError::Protocol { .. }) => Input::Failed(error),
                Err(error) => Input::LinkLost(error),
            }]
        } else {
            // Messages on an old channel are ignored.
            Vec::new()
        };
        for input in inputs {
            self.tell(input, network);
        }
    }

    /// Delivers a message that the destination may not send now.
    pub fn forged(&mut self, number: u16, network: &mut Network) {
        let Some(channel) = self.process.as_ref().and_then(|process| process.control) else {
            return;
        };
        network.note(|| format!("source: hears a forged message {number}"));
        let mut bytes = Vec::new();
        forge(number, self.config.session).encode(network.protocol, &mut bytes);
        self.deliver(channel, &bytes, network);
    }

    fn sabotaged(&self, message: ControlMessage) -> ControlMessage {
        let ControlMessage::Answer { session, word, token } = message else { return message };
        let word = match (self.sabotage, word) {
            (Some(Sabotage::UnknownIsAborted), SessionWord::Unknown) => SessionWord::Aborted,
            (Some(Sabotage::FetchingIsOwns), SessionWord::Fetching) => SessionWord::Owns,
            (Some(Sabotage::EndedIsOwns), SessionWord::Ended) => SessionWord::Owns,
            (_, word) => word,
        };
        ControlMessage::Answer { session, word, token }
    }

    /// A channel has ended.
    pub fn closed(&mut self, channel: ChannelId, network: &mut Network) {
        let Some(process) = &mut self.process else { return };
        if self.sabotage == Some(Sabotage::NoClock) {
            return;
        }
        let input = if process.is_dialing(channel) {
            process.dialed_in_vain(channel)
        } else if let Some(lane) = process.lane_of(channel) {
            if process.runs_on_before_ready() {
                return;
            }
            process.lane_ended(lane)
        } else if let Some(lane) = process.fetch.lane_of(channel) {
            process.fetch_lane_ended(lane)
        } else if process.control == Some(channel) {
            let end = std::io::ErrorKind::UnexpectedEof.into();
            Some(Input::LinkLost(lost("control", process.machine.phase_name(), &end)))
        } else {
            None
        };
        if let Some(input) = input {
            self.tell(input, network);
        }
    }

    fn pump(&mut self, network: &mut Network) {
        loop {
            if self.absence.is_away() {
                return;
            }
            let Some(process) = &mut self.process else { return };
            let Some(action) = process.machine.next_action() else { break };
            if let Action::Report(Report::InDoubt { reason }) = &action {
                self.was_in_doubt = true;
                self.doubted_silence |= reason.contains("any sign of life");
            }
            self.links.note(&action, network.now());
            network.note(|| format!("source: {}", brief(&format!("{action:?}"))));
            let step = step_of(&action);
            let input = process.execute(action, &self.guest, network);
            let input = self.absence.after(step, self.number, input, network);
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
                Ending::Given | Ending::Lost(_) => SourceEnd::Given,
                Ending::Kept(_) => SourceEnd::Kept,
            });
            if let Some(process) = self.process.take() {
                process.close(network);
            }
        }
    }
}

/// The step that an action is, if it may take long.
fn step_of(action: &Action) -> Option<Step> {
    match action {
        Action::StartLog => Some(Step::StartLog),
        Action::Harvest | Action::HarvestMore => Some(Step::Harvest),
        Action::Pause => Some(Step::Pause),
        Action::HarvestLast => Some(Step::HarvestLast),
        Action::Save => Some(Step::Save),
        Action::WriteCommit(_) => Some(Step::WriteCommit),
        _ => None,
    }
}

/// The first part of a text, for one line of a trace.
pub fn brief(text: &str) -> String {
    text.chars().take(120).collect()
}
