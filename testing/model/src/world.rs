//! One state of the model.

use std::collections::BTreeSet;

use vmferry_handover::{
    DestinationEffect, DestinationRecords, DestinationState, SessionKind, SessionWord,
    SourceEffect, SourceState,
};

use crate::witness::Witness;

/// Both hosts and the network between them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    /// The host that the guest leaves.
    pub source: Source,
    /// The host that the guest moves to.
    pub destination: Destination,
    /// Every message ever sent. A message may arrive at any time, repeatedly, or never. This models
    /// a network that delays, reorders, repeats and loses messages.
    pub network: BTreeSet<Message>,
    /// The witness, if the session has one.
    pub witness: Option<Witness>,
    /// Whether the guest at the destination outlives the process that receives it, like a QEMU
    /// guest. Otherwise it dies with that process.
    pub outlives: bool,
    /// Whether the destination may run the guest before it has all pages.
    pub kind: SessionKind,
    /// Whether the guest at the destination lacks pages that only the source has.
    pub lacks_pages: bool,
    /// Whether the guest has crashed at the destination while it lacked pages.
    pub crashed_lacking: bool,
    /// Whether the operator has given the guest up.
    pub given_up: bool,
    /// Whether faults have ended.
    pub faults_ended: bool,
    /// Whether the hosts cannot reach each other any more, although faults have ended.
    pub cut_for_good: bool,
    /// Whether the guest was started from its disks on a third host.
    pub started_elsewhere: bool,
    /// Whether the guest has run at the destination.
    pub ran_at_destination: bool,
    /// Whether the guest has run at the source since its state was saved.
    pub resumed_here: bool,
    /// Whether the guest has continued from an outdated state.
    pub ran_outdated_state: bool,
}

/// The source.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// The process that migrates; `None` while it is dead. The guest does not die with it.
    pub process: Option<SourceProcess>,
    /// Whether COMMIT is in the journal.
    pub committed: bool,
    /// Whether KEPT is in the journal.
    pub kept: bool,
    /// Whether GIVEN is in the journal.
    pub given: bool,
    /// Whether SERVING is in the journal.
    pub serving: bool,
    /// The guest at the source.
    pub guest: SourceGuest,
    /// Whether the guest was paused and everything was sent.
    pub sent_final: bool,
    /// Whether the host was fenced.
    pub lost: bool,
}

/// The process that migrates.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SourceProcess {
    /// The engine's own state.
    pub state: SourceState,
    /// Pending effects, in order.
    pub todo: Vec<SourceEffect>,
    /// Whether COMMIT is being written.
    pub writing: bool,
}

/// The guest at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SourceGuest {
    /// It runs.
    Running,
    /// It is paused.
    Paused,
    /// It was released.
    Released,
    /// It ended with its host.
    Lost,
}

/// The destination.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Destination {
    /// The process that receives; `None` while it is dead.
    pub process: Option<DestinationProcess>,
    /// Whether OPEN is in the journal.
    pub opened: bool,
    /// Whether RUN-INTENT is in the journal.
    pub intent: bool,
    /// Whether FETCHED is in the journal.
    pub fetched: bool,
    /// Whether ENDED is in the journal.
    pub ended: bool,
    /// Whether ABORTED is in the journal.
    pub aborted: bool,
    /// The guest at the destination.
    pub guest: DestinationGuest,
    /// Whether the host is lost permanently.
    pub lost: bool,
}

/// The process that receives.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DestinationProcess {
    /// The engine's own state; `None` if the process does not know the session.
    pub session: Option<DestinationState>,
    /// Pending effects, in order.
    pub todo: Vec<DestinationEffect>,
    /// The record that is being written.
    pub writing: Option<DestinationRecord>,
}

/// The records in a destination's journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DestinationRecord {
    /// OPEN: the session exists.
    Open,
    /// RUN-INTENT: the destination owns the guest.
    RunIntent,
    /// FETCHED: the guest has all its pages.
    Fetched,
    /// ENDED: the guest has crashed while it lacked pages.
    Ended,
    /// ABORTED: the guest never ran here and never will.
    Aborted,
}

/// The guest at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DestinationGuest {
    /// It is absent or incomplete.
    Absent,
    /// All memory is placed, or can be fetched, and the state is loaded.
    Loaded,
    /// It runs.
    Running,
    /// It ran, or RUN-INTENT promised it, and it died, by itself or with its process.
    Crashed,
    /// It ran here and has moved to a third host. Its VMM is still here, paused.
    MovedOn,
}

/// A message of the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Message {
    /// Source: everything was sent.
    Final,
    /// Destination: everything is placed.
    Ready,
    /// Source: the destination owns the guest.
    Commit,
    /// Source: there will be no COMMIT.
    Abort,
    /// Source: asks for the destination's word.
    Query,
    /// Destination: the guest runs here and needs nothing of the source.
    Running,
    /// Destination: the guest runs here and lacks pages.
    Fetching,
    /// Destination: the guest never ran here and never will.
    Aborted,
    /// The word of the destination, or of another host in its place.
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
    /// The initial state: the guest runs at the source, and the destination's process listens.
    #[must_use]
    pub fn start(outlives: bool, kind: SessionKind, witness: Option<Witness>) -> Self {
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
                serving: false,
                guest: SourceGuest::Running,
                sent_final: false,
                lost: false,
            },
            destination: Destination {
                process: Some(DestinationProcess::listening()),
                opened: false,
                intent: false,
                fetched: false,
                ended: false,
                aborted: false,
                guest: DestinationGuest::Absent,
                lost: false,
            },
            network: BTreeSet::new(),
            witness,
            outlives,
            kind,
            lacks_pages: false,
            crashed_lacking: false,
            given_up: false,
            faults_ended: false,
            cut_for_good: false,
            started_elsewhere: false,
            ran_at_destination: false,
            resumed_here: false,
            ran_outdated_state: false,
        }
    }

    /// Whether two hosts run the guest.
    #[must_use]
    pub fn runs_on_two_hosts(&self) -> bool {
        let here = self.source.guest == SourceGuest::Running;
        let there = self.destination.guest == DestinationGuest::Running;
        [here, there, self.started_elsewhere].into_iter().filter(|runs| *runs).count() > 1
    }

    /// Whether messages can arrive at all.
    #[must_use]
    pub fn hosts_are_linked(&self) -> bool {
        !self.cut_for_good
    }

    /// The promises in the destination's journal.
    #[must_use]
    pub fn destination_records(&self) -> DestinationRecords {
        let Destination { opened, intent, fetched, ended, aborted, .. } = self.destination;
        let intent = intent.then_some(self.kind);
        DestinationRecords { opened, intent, fetched, ended, aborted }
    }

    /// Whether the guest at the destination lacks pages that no host has any more.
    #[must_use]
    pub fn has_lost_pages(&self) -> bool {
        self.lacks_pages && self.source.guest == SourceGuest::Released
    }

    /// Whether the source has freed what the guest lacked when it crashed, without the operator's
    /// word.
    #[must_use]
    pub fn has_freed_remains(&self) -> bool {
        self.crashed_lacking && self.source.guest == SourceGuest::Released && !self.given_up
    }

    /// Whether missing pages can arrive. Both processes are needed, and a guest at the source that
    /// has not run since its state was saved.
    #[must_use]
    pub fn can_fetch(&self) -> bool {
        self.lacks_pages
            && self.hosts_are_linked()
            && self.source.process.is_some()
            && self.source.guest == SourceGuest::Paused
            && self.destination.process.is_some()
    }

    /// Who has the guest now, in words.
    #[must_use]
    pub fn who_has_the_guest(&self) -> String {
        let source = match self.source.guest {
            SourceGuest::Running => "the source runs the guest",
            SourceGuest::Paused => "the source has it paused",
            SourceGuest::Released => "the source has given it up",
            SourceGuest::Lost => "it ended with the source's host",
        };
        let destination = match (self.destination.guest, &self.destination.process) {
            (DestinationGuest::Running, _) if self.has_lost_pages() => {
                "the destination runs it without pages that are lost"
            }
            (DestinationGuest::Running, _) if self.lacks_pages => {
                "the destination runs it and lacks pages"
            }
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
        let elsewhere = if self.started_elsewhere {
            ", a third host has started it from its disks"
        } else {
            ""
        };
        let past =
            if self.ran_outdated_state { ", and it continued from an outdated state" } else { "" };
        format!("{source}, {destination}{elsewhere}{past}")
    }

    /// Whether the source has the guest, and nothing can change that.
    fn is_kept(&self) -> bool {
        let Some(source) = &self.source.process else { return false };
        source.todo.is_empty()
            && !source.writing
            && source.state == SourceState::Kept
            && self.source.guest == SourceGuest::Running
    }

    /// Whether the guest runs at the destination, lacks pages that the source keeps, and can't
    /// fetch them because the hosts are cut off from each other.
    fn waits_for_the_link(&self) -> bool {
        let (Some(source), Some(destination)) = (&self.source.process, &self.destination.process)
        else {
            return false;
        };
        self.cut_for_good
            && source.todo.is_empty()
            && destination.todo.is_empty()
            && source.state == SourceState::Serving
            && self.source.guest == SourceGuest::Paused
            && destination.session == Some(DestinationState::Fetching)
            && self.destination.guest == DestinationGuest::Running
    }

    /// Whether everything is decided, exactly one host has the guest, and the guest runs. If a
    /// guest died with its process after RUN-INTENT, the destination owns it: that is a crash of
    /// the guest and not a failed migration. This exception does not apply to a guest that outlives
    /// its process.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        if self.destination.lost {
            return self.is_kept();
        }
        if self.waits_for_the_link() {
            return true;
        }
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
            None | Some(
                DestinationState::Owns | DestinationState::Ended | DestinationState::Aborted
            )
        );
        let here = self.is_kept();
        let there =
            matches!(destination.session, Some(DestinationState::Owns | DestinationState::Ended));
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
    /// A process that knows no session.
    #[must_use]
    pub fn listening() -> Self {
        Self { session: None, todo: Vec::new(), writing: None }
    }
}
