//! One state of the model.

use std::collections::BTreeSet;

use vmferry_handover::SessionWord;
use vmferry_handover::{DestinationEffect, DestinationState, SourceEffect, SourceState};

/// Both hosts and what is between them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    /// The host that the guest leaves.
    pub source: Source,
    /// The host that it goes to.
    pub destination: Destination,
    /// Everything that was ever sent. A message may arrive at any time, again and again, or never:
    /// that is a network that delays, reorders, repeats and loses.
    pub network: BTreeSet<Message>,
    /// The guest at the destination outlives the process that receives it, as a QEMU does;
    /// otherwise it dies with that process.
    pub outlives: bool,
    /// No more faults.
    pub healed: bool,
    /// The guest has run at the destination.
    pub ran_there: bool,
    /// The guest has run on at the source since its state was saved.
    pub went_on_here: bool,
    /// The guest ran on from a state that was not its last.
    pub ran_from_the_past: bool,
}

/// The source.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// The process that migrates; `None` while it is dead. The guest does not die with it.
    pub process: Option<SourceProcess>,
    /// COMMIT is in the journal.
    pub committed: bool,
    /// KEPT is in the journal.
    pub kept: bool,
    /// GIVEN is in the journal.
    pub given: bool,
    /// The guest here.
    pub guest: SourceGuest,
    /// The guest was paused and everything was sent.
    pub sent_final: bool,
}

/// The process that migrates.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SourceProcess {
    /// The engine's own state.
    pub state: SourceState,
    /// What is still to be done, in this order.
    pub todo: Vec<SourceEffect>,
    /// COMMIT is being written.
    pub writing: bool,
}

/// The guest at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SourceGuest {
    /// Runs.
    Running,
    /// Paused.
    Paused,
    /// Given up, and gone.
    Released,
}

/// The destination.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Destination {
    /// The process that receives; `None` while it is dead.
    pub process: Option<DestinationProcess>,
    /// OPEN is in the journal.
    pub opened: bool,
    /// RUN-INTENT is in the journal.
    pub intent: bool,
    /// ABORTED is in the journal.
    pub aborted: bool,
    /// The guest here.
    pub guest: DestinationGuest,
    /// The host never comes back.
    pub lost: bool,
}

/// The process that receives.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DestinationProcess {
    /// The engine's own state; `None` if the process does not know the session.
    pub session: Option<DestinationState>,
    /// What is still to be done, in this order.
    pub todo: Vec<DestinationEffect>,
    /// The record that is being written.
    pub writing: Option<DestinationRecord>,
}

/// What a destination writes to its journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DestinationRecord {
    /// The session exists.
    Open,
    /// The guest runs here, whatever happens.
    RunIntent,
    /// The guest never ran here and never will.
    Aborted,
}

/// The guest at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DestinationGuest {
    /// Not here, or not whole.
    Absent,
    /// All memory is placed and the state is loaded.
    Loaded,
    /// Runs.
    Running,
    /// Ran, or was promised to, and died with its process.
    Crashed,
    /// Ran here and was moved to a third host. Its VMM is still here, paused.
    MovedOn,
}

/// A message of the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Message {
    /// Source: everything was sent.
    Final,
    /// Destination: everything is here.
    Ready,
    /// Source: the guest is yours.
    Commit,
    /// Source: there will be no COMMIT.
    Abort,
    /// Source: what is your word?
    Query,
    /// Destination: the guest runs here.
    Running,
    /// Destination: it never ran here and never will.
    Aborted,
    /// Destination, or somebody in its place: the word.
    Answer(SessionWord),
}

impl Message {
    /// Whether the source sends it.
    #[must_use]
    pub fn is_to_destination(self) -> bool {
        matches!(self, Self::Final | Self::Commit | Self::Abort | Self::Query)
    }
}

impl World {
    /// The guest runs at the source, and the destination's process listens.
    #[must_use]
    pub fn start(outlives: bool) -> Self {
        Self {
            source: Source {
                process: Some(SourceProcess {
                    state: SourceState::Holding,
                    todo: Vec::new(),
                    writing: false,
                }),
                committed: false,
                kept: false,
                given: false,
                guest: SourceGuest::Running,
                sent_final: false,
            },
            destination: Destination {
                process: Some(DestinationProcess::listening()),
                opened: false,
                intent: false,
                aborted: false,
                guest: DestinationGuest::Absent,
                lost: false,
            },
            network: BTreeSet::new(),
            outlives,
            healed: false,
            ran_there: false,
            went_on_here: false,
            ran_from_the_past: false,
        }
    }

    /// Whether both hosts run the guest.
    #[must_use]
    pub fn two_run(&self) -> bool {
        self.source.guest == SourceGuest::Running
            && self.destination.guest == DestinationGuest::Running
    }

    /// Who has the guest now, in words.
    #[must_use]
    pub fn who_has_the_guest(&self) -> String {
        let source = match self.source.guest {
            SourceGuest::Running => "the source runs the guest",
            SourceGuest::Paused => "the source has it paused",
            SourceGuest::Released => "the source has given it up",
        };
        let destination = match (self.destination.guest, &self.destination.process) {
            (DestinationGuest::Running, _) => "the destination runs it",
            (DestinationGuest::MovedOn, _) => "a third host runs it",
            (DestinationGuest::Loaded, Some(process))
                if process.session == Some(DestinationState::Owns) =>
            {
                "the destination owns it and has it paused"
            }
            (DestinationGuest::Loaded, _) => "the destination has it loaded and paused",
            (_, Some(process)) if process.session == Some(DestinationState::Owns) => {
                "the destination's journal says that it is the destination's"
            }
            _ => "the destination does not have it",
        };
        let past = if self.ran_from_the_past { ", and it went on from a past" } else { "" };
        format!("{source}, {destination}{past}")
    }

    /// Whether everything is decided, exactly one host has the guest, and the guest runs. A guest
    /// that died with its process after RUN-INTENT is the destination's: that is a crash of the
    /// guest, and no failed migration. A guest that outlives its process has no such excuse.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        let (Some(source), Some(destination)) = (&self.source.process, &self.destination.process)
        else {
            return false;
        };
        let idle = source.todo.is_empty()
            && !source.writing
            && destination.todo.is_empty()
            && destination.writing.is_none();
        let decided_there = matches!(
            destination.session,
            None | Some(DestinationState::Owns | DestinationState::Aborted)
        );
        let here = source.state == SourceState::Kept && self.source.guest == SourceGuest::Running;
        let there = destination.session == Some(DestinationState::Owns);
        let runs_there = match self.destination.guest {
            DestinationGuest::Running | DestinationGuest::MovedOn | DestinationGuest::Crashed => {
                true
            }
            DestinationGuest::Absent => !self.outlives,
            DestinationGuest::Loaded => false,
        };
        let is_left_over = self.destination.guest == DestinationGuest::Loaded && !there;
        idle && source.state.is_final()
            && decided_there
            && here != there
            && (runs_there || !there)
            && !is_left_over
    }
}

impl DestinationProcess {
    /// One that knows no session.
    #[must_use]
    pub fn listening() -> Self {
        Self { session: None, todo: Vec::new(), writing: None }
    }
}
