//! The state space: the possible actions in each state, and the checked properties.

use stateright::{Model, Property};
use strum::{IntoStaticStr, VariantArray};
use vmferry_handover::{DestinationState, OperatorWord, Register, SessionKind, SourceState};

use crate::action::Action;
use crate::explorer::Known;
use crate::witness::Witness;
use crate::world::{DestinationGuest, SourceGuest, World};

/// The property that is checked after faults end.
pub(crate) const ONE_OWNER_IN_THE_END: &str = "in the end exactly one host has the guest";

/// A rule that is broken on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
pub enum BrokenRule {
    /// The source sends COMMIT before it is in its journal.
    #[strum(serialize = "COMMIT is sent without being journalled")]
    NoCommitInJournal,
    /// The source resumes the guest when the link is lost after COMMIT.
    #[strum(serialize = "the source resumes when the link is lost after COMMIT")]
    ResumeAfterCommit,
    /// The source treats the answer that a session is unknown as ABORTED.
    #[strum(serialize = "an unknown session is taken for ABORTED")]
    UnknownIsAborted,
    /// The destination runs the guest without RUN-INTENT in its journal.
    #[strum(serialize = "RUN-INTENT is left out")]
    NoRunIntent,
    /// The destination treats a failed write of RUN-INTENT as a successful one.
    #[strum(serialize = "a failed write of RUN-INTENT is taken for a good one")]
    FailedWriteIsWritten,
    /// A restarted source sends COMMIT if the destination still waits for it.
    #[strum(serialize = "a restarted source sends COMMIT")]
    RestartedSendsCommit,
    /// The source treats the end of the link after COMMIT as success.
    #[strum(serialize = "the end of the link after COMMIT is taken for success")]
    EndOfLinkIsSuccess,
    /// A restarted destination only gives its word. It does not run a guest that outlived its
    /// process.
    #[strum(serialize = "a restarted destination does not finish what RUN-INTENT promises")]
    NotFinishedAfterRestart,
    /// A restarted destination runs a loaded guest without checking for RUN-INTENT.
    #[strum(serialize = "a restarted destination runs a loaded guest without RUN-INTENT")]
    RunsWithoutLooking,
    /// A restarted destination also runs a guest that has run there and has moved on since.
    #[strum(serialize = "a restarted destination runs a guest that has moved on")]
    RunsWhatMovedOn,
    /// A destination discards the guest although RUN-INTENT may be on disk.
    #[strum(serialize = "the guest is thrown away when RUN-INTENT may be on disk")]
    StuckDiscards,
    /// KEPT is written before the returned guest is resumed.
    #[strum(serialize = "KEPT is written before the guest is resumed")]
    KeptBeforeResumed,
    /// A destination that lacks pages says that it needs nothing of the source.
    #[strum(serialize = "RUNNING is sent before every page has arrived")]
    RunningWithoutAllPages,
    /// An operator's word that the destination runs the guest frees pages that it lacks.
    #[strum(serialize = "the operator's word frees pages that the guest lacks")]
    OperatorFreesPages,
    /// A serving source takes the guest back when the link is lost.
    #[strum(serialize = "a serving source resumes when the link is lost")]
    ServingResumes,
    /// A restarted source treats SERVING as GIVEN.
    #[strum(serialize = "a restarted source takes SERVING for GIVEN")]
    ServingForgotten,
    /// A destination treats a guest that has crashed as one that has all its pages.
    #[strum(serialize = "a crashed guest is taken for one that has all pages")]
    CrashedIsFetched,
    /// A source frees what a crashed guest lacked without an operator's word.
    #[strum(serialize = "the word that a guest has crashed frees the pages that it lacked")]
    EndedFreesPages,
    /// A restarted destination treats the RUN-INTENT of a guest that lacks pages as any other.
    #[strum(serialize = "a restarted destination forgets that the guest lacks pages")]
    FetchingForgotten,
    /// A destination runs the guest although the witness was not asked.
    #[strum(serialize = "the destination runs the guest without a claim")]
    RunsUnclaimed,
    /// A destination treats an unanswered claim as granted.
    #[strum(serialize = "an unanswered claim is taken for a granted one")]
    UnansweredIsGranted,
    /// A source in doubt treats an unanswered request as granted.
    #[strum(serialize = "a source that can't reach the witness takes the guest back")]
    UnansweredIsTakenBack,
    /// A source in doubt takes the guest back when the lease of the destination's host ends.
    #[strum(serialize = "the end of the destination's lease gives the guest back")]
    LeaseEndTakesBack,
    /// A source releases the guest when the destination has claimed it.
    #[strum(serialize = "a claim is taken for the destination's word that it owns the guest")]
    ClaimedIsOwns,
    /// A claim is written without a comparison.
    #[strum(serialize = "a claim overwrites what the witness has on record")]
    ClaimIsNotCompared,
    /// An agent reports that the destination owns the guest before its journal says so.
    #[strum(serialize = "OWNS is reported to the witness before RUN-INTENT is written")]
    ReportedBeforeWritten,
    /// The hosts trust a witness that was restored from a backup.
    #[strum(serialize = "a witness that was restored from a backup is trusted")]
    RestoredIsTrusted,
    /// A session has a register only once it is claimed, so that freeing finds none.
    #[strum(serialize = "the guest is accepted before its session has a register")]
    NotOpened,
    /// An operator frees the guests of a host that was not fenced.
    #[strum(serialize = "a host is declared lost although it was not fenced")]
    FreedWithoutFencing,
}

impl BrokenRule {
    /// All rules that can be broken.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// The broken rule in words.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Whether the rule is about the witness.
    pub(crate) fn has_witness(self) -> bool {
        matches!(
            self,
            Self::RunsUnclaimed
                | Self::UnansweredIsGranted
                | Self::UnansweredIsTakenBack
                | Self::LeaseEndTakesBack
                | Self::ClaimedIsOwns
                | Self::ClaimIsNotCompared
                | Self::ReportedBeforeWritten
                | Self::RestoredIsTrusted
                | Self::NotOpened
                | Self::FreedWithoutFencing
        )
    }

    /// The kind of session that the rule is about.
    fn kind(self) -> SessionKind {
        match self {
            Self::RunningWithoutAllPages
            | Self::OperatorFreesPages
            | Self::ServingResumes
            | Self::CrashedIsFetched
            | Self::EndedFreesPages
            | Self::ServingForgotten
            | Self::FetchingForgotten => SessionKind::PostCopy,
            _ => SessionKind::PreCopy,
        }
    }
}

/// The model of the handover.
#[derive(Debug, Default)]
pub struct Handover {
    /// The broken rule, if any.
    pub broken: Option<BrokenRule>,
    /// Whether the session has a witness.
    pub witnessed: bool,
    /// The only kind of session to explore; `None` explores both.
    pub kind: Option<SessionKind>,
    /// The only property to check; `None` checks all.
    pub only: Option<&'static str>,
    /// Fault-free states from which a settled state is known to be reachable.
    pub(crate) settling: Known<World>,
}

impl Handover {
    fn source_actions(&self, world: &World, actions: &mut Vec<Action>) {
        let faults = !world.faults_ended;
        if world.source.lost {
            return;
        }
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
        // Every wait of the source is bounded, so this happens even without faults.
        actions.push(Action::SourceLosesLink);
        if process.state == SourceState::Holding || faults {
            actions.push(Action::SourceFails);
        }
        if matches!(process.state, SourceState::InDoubt { .. }) && faults {
            actions.push(Action::StrangerAnswers);
            if world.destination.intent {
                actions.push(Action::OperatorSays(OperatorWord::DestinationOwns));
            } else if world.destination.lost && !world.ran_at_destination {
                actions.push(Action::OperatorSays(OperatorWord::SourceResumes));
            }
        }
        // An operator knows that the host is lost, or is told that the guest has crashed.
        let may_give_up = match process.state {
            SourceState::Serving => world.destination.lost,
            state => state == SourceState::Ended,
        };
        if may_give_up {
            actions.push(Action::OperatorGivesUp);
        }
        if faults && process.state == SourceState::Serving {
            actions.push(Action::StrangerAnswers);
        }
    }

    fn destination_actions(&self, world: &World, actions: &mut Vec<Action>) {
        let faults = !world.faults_ended;
        if world.destination.lost {
            return;
        }
        if faults {
            actions.push(Action::DestinationIsLost);
        }
        let runs = world.destination.guest == DestinationGuest::Running;
        if faults && world.outlives && runs && world.lacks_pages {
            actions.push(Action::GuestCrashes);
        }
        // A guest that lacks pages is not sent on.
        if world.outlives && runs && !world.lacks_pages {
            actions.push(Action::GuestMovesOn);
        }
        let Some(process) = &world.destination.process else {
            actions.push(Action::DestinationRestarts);
            return;
        };
        // A process whose journal failed exits, and its operator restarts it.
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
            // A witness that does not answer opens no session.
            None if !world.destination.opened
                && process.writing.is_none()
                && world.witness.as_ref().is_none_or(|witness| witness.register.is_some()) =>
            {
                actions.push(Action::DestinationOpens);
            }
            None => {}
            Some(state) => {
                if world.can_fetch() {
                    actions.push(Action::PagesArrive);
                }
                let is_gone = matches!(
                    world.destination.guest,
                    DestinationGuest::Crashed | DestinationGuest::Absent
                );
                if state == DestinationState::Fetching && is_gone {
                    actions.push(Action::DestinationNoticesCrash);
                } else if state == DestinationState::Fetching && !world.lacks_pages {
                    actions.push(Action::DestinationHasAll);
                }
                if matches!(state, DestinationState::Ready | DestinationState::Claiming) {
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
        let kinds = match self.kind.or(self.broken.map(BrokenRule::kind)) {
            None => vec![SessionKind::PreCopy, SessionKind::PostCopy],
            Some(kind) => vec![kind],
        };
        let witness = self.witnessed.then(Witness::unopened);
        let of = |kind| {
            let witness = &witness;
            [false, true].map(|outlives| World::start(outlives, kind, witness.clone()))
        };
        kinds.into_iter().flat_map(of).collect()
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        self.source_actions(world, actions);
        self.destination_actions(world, actions);
        if world.hosts_are_linked() {
            actions.extend(world.network.iter().map(|message| Action::Deliver(*message)));
        }
        self.witness_actions(world, actions);
        if world.faults_ended || world.source.lost {
            return;
        }
        // A guest that was never claimed needs no operator, even if the destination is lost.
        let gives_back =
            [Register::Unopened, Register::Open, Register::TakenBack, Register::Aborted];
        let gives_back = gives_back.map(Option::Some);
        if !world.destination.lost || gives_back.contains(&world.register()) {
            actions.push(Action::FaultsEnd { linked: true });
        }
        if world.register().is_some() && !world.destination.lost {
            actions.push(Action::FaultsEnd { linked: false });
        }
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let mut next = world.clone();
        self.apply(&mut next, action);
        (next != *world).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::always("two hosts never run the guest", |_, world: &World| {
                !world.runs_on_two_hosts()
            }),
            Property::always("the guest never goes on from a past", |_, world: &World| {
                !world.ran_outdated_state
            }),
            Property::always("no page that the guest lacks is freed", |_, world: &World| {
                !world.has_lost_pages()
            }),
            Property::always(
                "what a crashed guest lacked is freed by an operator only",
                |_, world: &World| !world.has_freed_remains(),
            ),
            Property::always(
                "in the end exactly one host has the guest",
                |model: &Self, world: &World| !world.faults_ended || model.settles(world),
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
        if self.kind != Some(SessionKind::PreCopy) {
            properties.extend(post_copy_properties());
        }
        if self.witnessed {
            properties.extend(witnessed_properties());
        }
        properties.retain(|property| self.only.is_none_or(|only| property.name == only));
        properties
    }
}

/// What a witness is for.
fn witnessed_properties() -> [Property<Handover>; 3] {
    [
        Property::sometimes("the witness gives the guest back", |_, world: &World| {
            world.register() == Some(Register::TakenBack)
                && world.source.guest == SourceGuest::Running
                && world.source.kept
        }),
        Property::sometimes(
            "the witness says that the destination has the guest",
            |_, world: &World| {
                world.register() == Some(Register::Owns)
                    && world.cut_for_good
                    && world.source.guest == SourceGuest::Released
            },
        ),
        Property::sometimes("a fenced host's guest starts elsewhere", |_, world: &World| {
            world.started_elsewhere
        }),
    ]
}

/// What a session with post-copy comes to.
fn post_copy_properties() -> [Property<Handover>; 3] {
    [
        Property::sometimes("both processes die while the guest lacks pages", |_, world| {
            let World { source, destination, .. } = world;
            world.lacks_pages
                && destination.guest == DestinationGuest::Running
                && source.process.is_none()
                && destination.process.is_none()
        }),
        Property::sometimes("a guest that lacked pages has all", |_, world: &World| {
            world.destination.fetched && world.destination.guest == DestinationGuest::Running
        }),
        Property::sometimes("a guest crashes while it lacks pages", |_, world: &World| {
            world.destination.ended && world.given_up
        }),
    ]
}
