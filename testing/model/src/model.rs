//! The state space: what may happen in a state, and what comes of it.

use std::collections::HashSet;
use std::sync::Mutex;

use stateright::{Model, Property};
use vmferry_handover::{DestinationState, OperatorWord, SourceState};

use crate::action::Action;
use crate::world::{DestinationGuest, SourceGuest, World};

/// The property of what comes after the end of faults.
pub(crate) const IN_THE_END: &str = "in the end exactly one host has the guest";

/// A rule that is broken on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Broken {
    /// The source sends COMMIT before it is in its journal.
    NoCommitInJournal,
    /// The source resumes the guest when the link is lost after COMMIT.
    ResumeAfterCommit,
    /// The answer that a session is unknown is taken for ABORTED.
    UnknownIsAborted,
    /// The destination runs the guest without RUN-INTENT in its journal.
    NoRunIntent,
    /// A write of RUN-INTENT that failed is taken for one that did not.
    FailedWriteIsWritten,
    /// A source that was restarted sends COMMIT when the destination still waits.
    RestartedSendsCommit,
    /// The end of the link after COMMIT is taken for success.
    EndOfLinkIsSuccess,
    /// A restarted destination only gives its word, and runs no guest that outlived its process.
    NotFinishedAfterRestart,
    /// A restarted destination runs a loaded guest without looking for RUN-INTENT.
    RunsWithoutLooking,
    /// A restarted destination also runs a guest that has run there and was moved on since.
    RunsWhatMovedOn,
    /// A destination that does not know whether RUN-INTENT is on disk throws the guest away.
    StuckDiscards,
    /// KEPT is written before the guest that comes back is resumed.
    KeptBeforeResumed,
}

impl Broken {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::NoCommitInJournal,
        Self::ResumeAfterCommit,
        Self::UnknownIsAborted,
        Self::NoRunIntent,
        Self::FailedWriteIsWritten,
        Self::RestartedSendsCommit,
        Self::EndOfLinkIsSuccess,
        Self::NotFinishedAfterRestart,
        Self::RunsWithoutLooking,
        Self::RunsWhatMovedOn,
        Self::StuckDiscards,
        Self::KeptBeforeResumed,
    ];

    /// In words.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NoCommitInJournal => "COMMIT is sent without being journalled",
            Self::ResumeAfterCommit => "the source resumes when the link is lost after COMMIT",
            Self::UnknownIsAborted => "an unknown session is taken for ABORTED",
            Self::NoRunIntent => "RUN-INTENT is left out",
            Self::FailedWriteIsWritten => "a failed write of RUN-INTENT is taken for a good one",
            Self::RestartedSendsCommit => "a restarted source sends COMMIT",
            Self::EndOfLinkIsSuccess => "the end of the link after COMMIT is taken for success",
            Self::NotFinishedAfterRestart => {
                "a restarted destination does not finish what RUN-INTENT promises"
            }
            Self::RunsWithoutLooking => {
                "a restarted destination runs a loaded guest without RUN-INTENT"
            }
            Self::RunsWhatMovedOn => "a restarted destination runs a guest that has moved on",
            Self::StuckDiscards => "the guest is thrown away when RUN-INTENT may be on disk",
            Self::KeptBeforeResumed => "KEPT is written before the guest is resumed",
        }
    }
}

/// The model of the handover.
#[derive(Debug, Default)]
pub struct Handover {
    /// The rule that is broken, if any.
    pub broken: Option<Broken>,
    /// The only property that is looked at; all by default.
    pub only: Option<&'static str>,
    /// States after the end of faults from which a settled one is known to be reached.
    pub(crate) settling: Mutex<HashSet<World>>,
}

impl Handover {
    fn source_actions(&self, world: &World, actions: &mut Vec<Action>) {
        let faults = !world.healed;
        let Some(process) = &world.source.process else {
            actions.push(Action::SourceRestarts);
            return;
        };
        if faults {
            actions.push(Action::SourceCrashes { on_disk: false });
            if process.writing {
                actions.push(Action::SourceCrashes { on_disk: true });
            }
        }
        if let Some(&effect) = process.todo.first() {
            actions.push(Action::SourceDoes { effect, fails: false });
            if faults {
                actions.push(Action::SourceDoes { effect, fails: true });
            }
            return;
        }
        if process.writing {
            actions.push(Action::SourceWrote { fails: false, on_disk: true });
            if faults {
                actions.push(Action::SourceWrote { fails: true, on_disk: false });
                actions.push(Action::SourceWrote { fails: true, on_disk: true });
            }
        }
        if process.state == SourceState::Holding
            && world.destination.opened
            && !world.source.sent_final
        {
            actions.push(Action::SourceSendsAll);
        }
        // Each of its waits is bounded, so that this comes even when nothing is lost any more.
        actions.push(Action::SourceLosesLink);
        if process.state == SourceState::Holding || faults {
            actions.push(Action::SourceFails);
        }
        if matches!(process.state, SourceState::InDoubt { .. }) && faults {
            actions.push(Action::StrangerAnswers);
            if world.destination.intent {
                actions.push(Action::OperatorSays(OperatorWord::DestinationOwns));
            } else if world.destination.lost && !world.ran_there {
                actions.push(Action::OperatorSays(OperatorWord::SourceResumes));
            }
        }
    }

    fn destination_actions(&self, world: &World, actions: &mut Vec<Action>) {
        let faults = !world.healed;
        if world.destination.lost {
            return;
        }
        if faults {
            actions.push(Action::DestinationIsLost);
        }
        if world.outlives && world.destination.guest == DestinationGuest::Running {
            actions.push(Action::GuestMovesOn);
        }
        let Some(process) = &world.destination.process else {
            actions.push(Action::DestinationRestarts);
            return;
        };
        // One whose journal has failed ends, and its operator starts it again.
        if faults || process.session == Some(DestinationState::Stuck) {
            actions.push(Action::DestinationCrashes { on_disk: false });
        }
        if faults && process.writing.is_some() {
            actions.push(Action::DestinationCrashes { on_disk: true });
        }
        if let Some(&effect) = process.todo.first() {
            actions.push(Action::DestinationDoes(effect));
            return;
        }
        if let Some(record) = process.writing {
            actions.push(Action::DestinationWrote { record, fails: false, on_disk: true });
            if faults {
                for on_disk in [false, true] {
                    actions.push(Action::DestinationWrote { record, fails: true, on_disk });
                }
            }
        }
        match process.session {
            None if !world.destination.opened && process.writing.is_none() => {
                actions.push(Action::DestinationOpens);
            }
            None => {}
            Some(state) => {
                if state == DestinationState::Ready {
                    actions.push(Action::CommitTimesOut);
                }
                if faults || state == DestinationState::Receiving {
                    actions.push(Action::DestinationLosesLink);
                }
                if faults {
                    actions.push(Action::DestinationFails);
                }
            }
        }
    }
}

impl Model for Handover {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![World::start(false), World::start(true)]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        self.source_actions(world, actions);
        self.destination_actions(world, actions);
        actions.extend(world.network.iter().map(|message| Action::Deliver(*message)));
        if !world.healed && !world.destination.lost {
            actions.push(Action::FaultsEnd);
        }
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let mut next = world.clone();
        self.apply(&mut next, action);
        (next != *world).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::always("two hosts never run the guest", |_, world: &World| !world.two_run()),
            Property::always("the guest never goes on from a past", |_, world: &World| {
                !world.ran_from_the_past
            }),
            Property::always(
                "in the end exactly one host has the guest",
                |model: &Self, world: &World| !world.healed || model.settles(world),
            ),
            Property::sometimes("the guest moves", |_, world: &World| {
                world.destination.guest == DestinationGuest::Running
                    && world.source.guest == SourceGuest::Released
            }),
            Property::sometimes(
                "the destination's process dies and its guest runs on",
                |_, world: &World| {
                    world.destination.process.is_none()
                        && world.destination.guest == DestinationGuest::Running
                },
            ),
            Property::sometimes("the source takes a committed guest back", |_, world: &World| {
                world.source.committed
                    && world.source.guest == SourceGuest::Running
                    && world.destination.aborted
            }),
            Property::sometimes("the source is in doubt", |_, world: &World| {
                matches!(
                    world.source.process.as_ref().map(|process| process.state),
                    Some(SourceState::InDoubt { .. })
                )
            }),
        ];
        properties.retain(|property| self.only.is_none_or(|only| property.name == only));
        properties
    }
}
