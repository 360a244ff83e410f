//! The source: its machine, its journal, and the actions it carries out for the machine.

mod tasks;

use std::time::Duration;

use vmferry::config::{ChannelCount, PostCopy, RoundLimit, ThrottleLimit, WhenStuck};
use vmferry::machine::peer::SourceSide;
use vmferry::machine::source::Source;
use vmferry::machine::source::io::{Action, Ending, Input as What};
use vmferry::{GuestDescription, SourceConfig};
use vmferry_handover::journal::{Record, kind_of_source};
use vmferry_handover::{OperatorWord, SessionKind, SourceState};
use vmferry_wire::{ControlMessage, SessionWord};

use self::tasks::Task;
use super::pages::SourcePages;
use super::{SESSION, Wire, carried, guest, layout, link_lost, open};
use crate::input::Input;

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
    /// The destination compares a sample of the guest's storage.
    samples_storage: bool,
    /// The destination or an operator has said that the guest is this side's, after COMMIT.
    may_resume: bool,
    /// COMMIT could not be written, was never sent, and may be on disk; or KEPT could not be
    /// written after the resume. The guest runs on, whatever the next process reads.
    ran_on: bool,
    pub pages: SourcePages,
    /// The destination has said that it needs nothing of this host, or an operator has.
    may_release: bool,
    /// The destination or an operator has said that the guest runs there, and has never all pages.
    must_serve: bool,
    /// The journal takes no outcome. No promise depends on one.
    loses_outcomes: bool,
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
        // Bit 7 announces another byte: conversations without it are pre-copy.
        let post_copy = if choices & 128 == 0 { 0 } else { input.byte() };
        if choices & 128 != 0 {
            config.post_copy = [PostCopy::Now, PostCopy::Auto][usize::from(post_copy & 1)];
            config.downtime_limit = Duration::from_millis(u64::from(post_copy >> 1 & 1) * 300);
            if post_copy & 4 != 0 {
                (config.post_copy, config.when_stuck) = (PostCopy::Never, WhenStuck::PostCopy);
            }
        }
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
            samples_storage: false,
            may_resume: false,
            ran_on: false,
            pages: SourcePages::default(),
            may_release: false,
            must_serve: false,
            loses_outcomes: post_copy & 8 != 0,
        };
        host.act(wire);
        host
    }

    pub fn guest_runs(&self) -> bool {
        self.runs
    }

    pub fn has_released(&self) -> bool {
        self.released
    }

    /// Whether requests for pages are answered, from the memory of a guest that does not change.
    pub fn serves(&self) -> bool {
        self.pages.are_served && !self.runs && !self.released
    }

    pub fn handover(&self) -> SourceState {
        self.machine.handover()
    }

    fn handle(&mut self, now: Duration, what: What, wire: &mut Wire) {
        self.machine.handle(now, what);
        self.act(wire);
    }

    pub fn hear(&mut self, now: Duration, message: ControlMessage, wire: &mut Wire) {
        let word = match &message {
            ControlMessage::Aborted { session: SESSION, .. } => Some(SessionWord::Aborted),
            ControlMessage::Running { session: SESSION, .. } => Some(SessionWord::Owns),
            ControlMessage::Answer { session: SESSION, word, .. } => Some(*word),
            _ => None,
        };
        self.may_resume |= word == Some(SessionWord::Aborted);
        if self.machine.handover().is_committed() {
            self.may_release |= word == Some(SessionWord::Owns);
            self.must_serve |= word == Some(SessionWord::Fetching);
        }
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
        if lane < self.config.channels.get() + self.config.fetch_lanes().count() {
            self.handle(now, What::LaneLost { lane, attempt: 0, error: link_lost() }, wire);
        }
    }

    /// Lets an operator decide a handover in doubt, or give up a guest whose pages are served.
    /// Returns whether one has decided.
    pub fn operator_speaks(
        &mut self,
        now: Duration,
        input: &mut Input<'_>,
        wire: &mut Wire,
    ) -> bool {
        let what = match self.machine.handover() {
            SourceState::InDoubt { .. } if input.byte().is_multiple_of(2) => {
                self.may_resume = true;
                What::Operator(OperatorWord::SourceResumes)
            }
            SourceState::InDoubt { .. } => {
                let lacks_pages = kind_of_source(&self.journal) == SessionKind::PostCopy;
                self.may_release |= !lacks_pages;
                self.must_serve |= lacks_pages;
                What::Operator(OperatorWord::DestinationOwns)
            }
            SourceState::Serving | SourceState::Ended => {
                self.may_release = true;
                What::GiveUp
            }
            _ => return false,
        };
        self.handle(now, what, wire);
        true
    }

    /// Another process takes over from the journal alone, next to the guest, which lives on.
    pub fn die_and_recover(&mut self, now: Duration, input: &mut Input<'_>, wire: &mut Wire) {
        if self.released {
            return;
        }
        let writing = self.tasks.iter().find_map(|task| match task {
            Task::Commit(kind) => Some(*kind),
            _ => None,
        });
        if let Some(kind) = writing
            && input.byte().is_multiple_of(2)
        {
            self.journal.push(Record::commit(kind));
            self.committed = true;
        }
        self.tasks.clear();
        self.recovered = true;
        let config = self.config.clone();
        let has_commit = self.journal.iter().any(Record::is_commit);
        let has_kept = self.journal.iter().any(|one| matches!(one, Record::Kept { .. }));
        // An earlier process may have failed to write COMMIT and resumed the guest; the next one
        // reads that COMMIT.
        self.committed = has_commit && !has_kept;
        (self.may_resume, self.may_release) = (false, false);
        self.must_serve = self.journal.contains(&Record::Serving);
        self.pages.are_served = false;
        wire.fetch.close();
        self.machine = Source::recovered(
            config,
            &description(),
            SourceSide::recovered(false, None),
            &self.journal,
            now,
        );
        self.act(wire);
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
                match &message {
                    ControlMessage::Commit { .. } => {
                        assert!(!self.recovered, "COMMIT by a process that did not write it");
                        let written = self.journal.iter().any(Record::is_commit);
                        assert!(written, "COMMIT before it is written");
                        assert!(!self.runs && self.committed);
                    }
                    ControlMessage::Final { kind: SessionKind::PostCopy, .. } => {
                        assert!(self.serves(), "FINAL before pages are served");
                        self.pages.keep();
                    }
                    _ => {}
                }
                self.send(&message, wire);
            }
            Action::OpenLanes(_) => self.tasks.push(Task::Join),
            Action::ResumeControl { .. } => self.tasks.push(Task::ResumeControl),
            Action::RejoinLane { lane, token, attempt, .. } => {
                assert!(lane < self.config.channels.get() + self.config.fetch_lanes().count());
                self.tasks.push(Task::Rejoin { lane, token, attempt });
            }
            Action::OpenFetchLanes { token, attempts } => {
                wire.fetch.close();
                self.tasks.push(Task::OpenFetch { token, attempts });
            }
            Action::TellLacking => {
                if let Some(message) = self.pages.lacking() {
                    self.send(&message, wire);
                }
            }
            Action::ReconnectVmm => {
                assert!(self.committed && !self.runs, "streams of a guest that may run here");
                self.tasks.push(Task::Reconnect);
            }
            Action::ServePages { .. } => {
                // Nobody requests pages of a guest that ran on: it never runs at the destination.
                assert!(!self.runs || self.ran_on, "pages of a running guest are served");
                self.pages.are_served = true;
            }
            Action::StartLog => self.tasks.push(Task::StartLog),
            Action::SendRound { .. } => {
                self.pages.send();
                self.tasks.extend((0..self.config.channels.get()).map(Task::Send));
            }
            Action::Harvest | Action::HarvestMore => self.tasks.push(Task::Harvest),
            Action::Pause => self.tasks.push(Task::Pause),
            Action::HarvestLast => self.tasks.push(Task::LastHarvest),
            Action::PrepareStorageSample => self.samples_storage = true,
            Action::Save => self.tasks.push(Task::Save),
            Action::SumDigest => self.tasks.push(Task::Sum),
            Action::Hash { attempt } => self.tasks.push(Task::Hash(attempt)),
            Action::WriteCommit(kind) => {
                assert!(!self.recovered && !self.runs);
                let serves = kind == SessionKind::PostCopy;
                assert_eq!(serves, self.pages.are_served, "COMMIT is of another kind than FINAL");
                self.tasks.push(Task::Commit(kind));
            }
            Action::AskWitness(_) => unreachable!("no conversation has a witness"),
            Action::Ask { offer, .. } => {
                wire.cut();
                self.tasks.retain(|task| !matches!(task, Task::Ask(_)));
                self.tasks.push(Task::Ask(offer));
            }
            Action::WriteOutcome(record) => {
                if !self.loses_outcomes {
                    self.journal.push(record);
                }
            }
            Action::Recall => {
                assert!(self.machine.handover() == SourceState::Holding);
                assert!(!self.pages.are_served, "a guest whose pages are served runs again");
                self.runs = true;
            }
            Action::Resume => {
                assert!(!self.released, "a guest that was given away runs again");
                assert!(
                    !self.committed || self.may_resume,
                    "resumed after COMMIT without ABORTED or an operator's decision"
                );
                assert!(!self.must_serve, "a guest that runs at the destination runs again");
                wire.fetch.close();
                self.committed = false;
                self.ran_on |= self.loses_outcomes;
                (self.runs, self.pages.are_served) = (true, false);
            }
            Action::Release => {
                assert!(!self.runs || self.ran_on, "a running guest is given away");
                assert!(self.may_release, "released before the destination needs nothing of it");
                wire.fetch.close();
                (self.runs, self.released) = (false, true);
            }
            Action::BeginCarriedPostCopy
            | Action::CutStreams { .. }
            | Action::TellFree
            | Action::FitWindows { .. }
            | Action::Cap(_)
            | Action::PackWith(_)
            | Action::Throttle { .. }
            | Action::SwitchOver
            | Action::LimitDowntime(_)
            | Action::Report(_) => {}
        }
    }

    fn send(&self, message: &ControlMessage, wire: &mut Wire) {
        if wire.ends[0] {
            wire.to_destination.push_back(carried(message));
        }
    }

    pub fn end(&mut self) {
        let handover = self.machine.handover();
        match self.machine.ending() {
            Some(Ending::Kept(_)) => assert_eq!(handover, SourceState::Kept),
            Some(Ending::Given | Ending::Lost(_)) => assert_eq!(handover, SourceState::Given),
            None => assert!(!handover.is_final()),
        }
    }
}

fn description() -> GuestDescription {
    GuestDescription { identity: guest(), vmm: "fuzz".into(), config: Vec::new(), layout: layout() }
}
