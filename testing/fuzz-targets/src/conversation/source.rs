//! The source: its machine, its journal, and the actions it carries out for the machine.

use std::time::Duration;

use vmferry::config::{ChannelCount, RoundLimit, ThrottleLimit, WhenStuck};
use vmferry::machine::peer::SourceSide;
use vmferry::machine::source::Source;
use vmferry::machine::source::io::{Action, Ending, Input as What};
use vmferry::rounds::tracker::LaneTotals;
use vmferry::{GuestDescription, SourceConfig};
use vmferry_handover::journal::Record;
use vmferry_handover::{OperatorWord, SessionKind, SourceState};
use vmferry_memory::WholeHash;
use vmferry_wire::{ControlMessage, SessionWord};

use super::destination::DestinationHost;
use super::{SESSION, Wire, carried, failure, guest, layout, link_lost, open};
use crate::input::Input;

const DIGEST: u64 = 7;

/// An action whose result is pending.
enum Task {
    Join,
    ResumeControl,
    Rejoin(u8),
    StartLog,
    Send(u8),
    Harvest,
    Pause,
    LastHarvest,
    Save,
    Sum,
    Hash(u32),
    Commit,
    Ask,
}

pub struct SourceHost {
    config: SourceConfig,
    machine: Source,
    journal: Vec<Record>,
    tasks: Vec<Task>,
    sequences: Vec<u64>,
    /// Whether the guest runs here.
    runs: bool,
    released: bool,
    /// This process has read COMMIT in the journal.
    recovered: bool,
    /// COMMIT is on disk, and no process has seen its write fail.
    committed: bool,
    /// The destination or an operator has said that the guest is this side's, after COMMIT.
    may_resume: bool,
    /// COMMIT could not be written, was never sent, and may be on disk. The guest runs on, whatever
    /// the next process reads.
    ran_on: bool,
}

impl SourceHost {
    pub fn new(input: &mut Input<'_>, wire: &mut Wire) -> Self {
        let choices = input.byte();
        let mut config = SourceConfig::new("unused".into());
        config.session = SESSION;
        config.channels = ChannelCount::new(1 + (choices & 1)).unwrap();
        config.verify = choices & 2 != 0;
        config.max_rounds = RoundLimit::new(1 + u32::from(choices >> 2 & 3)).unwrap();
        config.when_stuck =
            if choices & 16 == 0 { WhenStuck::SwitchOver } else { WhenStuck::Refuse };
        if choices & 32 != 0 {
            config.timeouts.reconnect = Duration::ZERO;
        }
        config.throttle = ThrottleLimit::new(if choices & 64 == 0 { 0 } else { 80 }).unwrap();
        let machine =
            Source::new(config.clone(), description(), SourceSide::new("none"), Duration::ZERO);
        let mut host = Self {
            sequences: vec![0; config.channels.get().into()],
            config,
            machine,
            journal: vec![open()],
            tasks: Vec::new(),
            runs: true,
            released: false,
            recovered: false,
            committed: false,
            may_resume: false,
            ran_on: false,
        };
        host.act(wire);
        host
    }

    pub fn guest_runs(&self) -> bool {
        self.runs
    }

    pub fn handover(&self) -> SourceState {
        self.machine.handover()
    }

    fn handle(&mut self, now: Duration, what: What, wire: &mut Wire) {
        self.machine.handle(now, what);
        self.act(wire);
    }

    pub fn hear(&mut self, now: Duration, message: ControlMessage, wire: &mut Wire) {
        let aborted = match &message {
            ControlMessage::Aborted { session, .. } => *session == SESSION,
            ControlMessage::Answer { session, word } => {
                *session == SESSION && *word == SessionWord::Aborted
            }
            _ => false,
        };
        self.may_resume |= aborted;
        self.handle(now, What::Control(message), wire);
    }

    pub fn tick(&mut self, now: Duration, wire: &mut Wire) {
        self.handle(now, What::Tick, wire);
    }

    pub fn cancel(&mut self, now: Duration, wire: &mut Wire) {
        self.handle(now, What::Cancel, wire);
    }

    pub fn lose_the_link(&mut self, now: Duration, wire: &mut Wire) {
        self.handle(now, What::LinkLost(link_lost()), wire);
    }

    pub fn lose_a_lane(&mut self, now: Duration, lane: u8, wire: &mut Wire) {
        if lane < self.config.channels.get() {
            self.handle(now, What::LaneLost { lane, attempt: 0, error: link_lost() }, wire);
        }
    }

    /// Lets an operator decide a handover in doubt. Returns whether one has decided.
    pub fn operator_speaks(
        &mut self,
        now: Duration,
        input: &mut Input<'_>,
        wire: &mut Wire,
    ) -> bool {
        if !matches!(self.machine.handover(), SourceState::InDoubt { .. }) {
            return false;
        }
        let resumes = input.byte().is_multiple_of(2);
        self.may_resume |= resumes;
        let word =
            if resumes { OperatorWord::SourceResumes } else { OperatorWord::DestinationOwns };
        self.handle(now, What::Operator(word), wire);
        true
    }

    /// Another process takes over from the journal alone, next to the guest, which lives on.
    pub fn die_and_recover(&mut self, now: Duration, input: &mut Input<'_>, wire: &mut Wire) {
        if self.released {
            return;
        }
        let writing = self.tasks.iter().any(|task| matches!(task, Task::Commit));
        if writing && input.byte().is_multiple_of(2) {
            self.journal.push(Record::Commit);
            self.committed = true;
        }
        self.tasks.clear();
        self.recovered = true;
        let config = self.config.clone();
        let has_commit = self.journal.contains(&Record::Commit);
        let has_kept = self.journal.iter().any(|one| matches!(one, Record::Kept { .. }));
        // An earlier process may have failed to write COMMIT and resumed the guest; the next one
        // reads that COMMIT.
        self.committed = has_commit && !has_kept;
        self.may_resume = false;
        self.machine = Source::recovered(config, &description(), &self.journal, now);
        self.act(wire);
    }

    /// Ends one of the pending actions with success or failure.
    pub fn finish_a_task(
        &mut self,
        now: Duration,
        input: &mut Input<'_>,
        wire: &mut Wire,
        destination: &mut DestinationHost,
    ) {
        if self.tasks.is_empty() {
            return;
        }
        let task = self.tasks.remove(usize::from(input.byte()) % self.tasks.len());
        let outcome = input.byte();
        let well = outcome < 0xe0;
        let took = Duration::from_millis(outcome.into());
        let what = match task {
            Task::Commit => {
                // A failed write may be on disk.
                let on_disk = well || outcome.is_multiple_of(2);
                if on_disk {
                    self.journal.push(Record::Commit);
                }
                self.committed = well;
                self.ran_on |= !well;
                What::CommitWritten(if well { Ok(()) } else { Err(failure()) })
            }
            Task::ResumeControl if well && destination.resume(now, wire) => {
                wire.cut();
                wire.ends = [true; 2];
                What::Resumed
            }
            Task::ResumeControl => What::NotResumed(link_lost()),
            Task::Ask if well && destination.is_there() => {
                wire.cut();
                wire.ends = [true; 2];
                wire.to_destination.push_back(ControlMessage::Query { session: SESSION });
                return;
            }
            Task::Ask => What::LinkLost(link_lost()),
            Task::Rejoin(lane) if well => {
                destination.rejoin(now, lane, wire);
                What::LaneRejoined { lane, placed: destination.placed(lane) }
            }
            Task::Rejoin(lane) => What::LaneNotRejoined { lane, error: link_lost() },
            _ if !well => What::Failed(failure()),
            Task::Join => What::LanesJoined,
            Task::StartLog => What::LogStarted { populated_pages: 1024, stood_still: took },
            Task::Send(lane) => {
                let sequence = &mut self.sequences[usize::from(lane)];
                *sequence += 1;
                wire.rounds.push_back((lane, *sequence));
                let totals = LaneTotals { bytes: outcome.into(), ..LaneTotals::default() };
                What::LaneSent { lane, end_sequence: *sequence, totals }
            }
            Task::Harvest => {
                What::Harvested { pages: u64::from(outcome) * 4, took, stood_still: Duration::ZERO }
            }
            Task::Pause => {
                self.runs = false;
                What::Paused { stood_still: took }
            }
            Task::LastHarvest => What::LastHarvest { pages: outcome.into(), took },
            Task::Save => What::Saved { state: [outcome; 3].into(), took, paused: false },
            Task::Sum => What::Digest(DIGEST),
            Task::Hash(attempt) => {
                What::Hashed { attempt, hash: WholeHash { hash: DIGEST, pages: 1 } }
            }
        };
        self.handle(now, what, wire);
    }

    fn act(&mut self, wire: &mut Wire) {
        let mut budget = 1000;
        while let Some(action) = self.machine.next_action() {
            budget -= 1;
            assert!(budget > 0, "the source never stops acting");
            self.do_it(action, wire);
        }
        let handover = self.machine.handover();
        assert!(!self.runs || self.ran_on || handover.may_run(), "the guest runs in {handover:?}");
    }

    fn do_it(&mut self, action: Action, wire: &mut Wire) {
        match action {
            Action::Send(message) => {
                if matches!(message, ControlMessage::Commit { .. }) {
                    assert!(!self.recovered, "COMMIT is sent by a process that did not write it");
                    assert!(self.journal.contains(&Record::Commit), "COMMIT before it is written");
                    assert!(!self.runs && self.committed);
                }
                if wire.ends[0] {
                    wire.to_destination.push_back(carried(&message));
                }
            }
            Action::OpenLanes(_) => self.tasks.push(Task::Join),
            Action::ResumeControl { .. } => self.tasks.push(Task::ResumeControl),
            Action::RejoinLane { lane, .. } => {
                assert!(lane < self.config.channels.get());
                self.tasks.push(Task::Rejoin(lane));
            }
            Action::StartLog => self.tasks.push(Task::StartLog),
            Action::SendRound { .. } => {
                self.tasks.extend((0..self.config.channels.get()).map(Task::Send));
            }
            Action::Harvest => self.tasks.push(Task::Harvest),
            Action::Pause => self.tasks.push(Task::Pause),
            Action::HarvestLast => self.tasks.push(Task::LastHarvest),
            Action::Save => self.tasks.push(Task::Save),
            Action::SumDigest => self.tasks.push(Task::Sum),
            Action::Hash { attempt } => self.tasks.push(Task::Hash(attempt)),
            Action::WriteCommit(kind) => {
                assert_eq!(kind, SessionKind::PreCopy, "no post-copy was announced");
                assert!(!self.recovered && !self.runs);
                self.tasks.push(Task::Commit);
            }
            Action::Ask { .. } => {
                wire.cut();
                self.tasks.retain(|task| !matches!(task, Task::Ask));
                self.tasks.push(Task::Ask);
            }
            Action::WriteOutcome(record) => self.journal.push(record),
            Action::Recall => {
                assert!(self.machine.handover() == SourceState::Holding);
                self.runs = true;
            }
            Action::Resume => {
                assert!(!self.released, "a guest that was given away runs again");
                assert!(
                    !self.committed || self.may_resume,
                    "resumed after COMMIT without ABORTED or an operator's decision"
                );
                self.committed = false;
                self.runs = true;
            }
            Action::Release => {
                assert!(!self.runs || self.ran_on, "a running guest is given away");
                (self.runs, self.released) = (false, true);
            }
            Action::OpenFetchLanes { .. } | Action::TellLacking | Action::ServePages { .. } => {
                panic!("the user has not asked for post-copy")
            }
            Action::TellFree
            | Action::FitWindows { .. }
            | Action::Cap(_)
            | Action::PackWith(_)
            | Action::Throttle { .. }
            | Action::SwitchOver
            | Action::LimitDowntime(_)
            | Action::Report(_) => {}
        }
    }

    pub fn end(&mut self) {
        let handover = self.machine.handover();
        match self.machine.ending() {
            Some(Ending::Kept(_)) => assert_eq!(handover, SourceState::Kept),
            Some(Ending::Given) => assert_eq!(handover, SourceState::Given),
            None => assert!(!handover.is_final()),
        }
    }
}

fn description() -> GuestDescription {
    GuestDescription { identity: guest(), vmm: "fuzz".into(), config: Vec::new(), layout: layout() }
}
