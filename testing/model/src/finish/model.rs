//! The state space of libvirt's Finish: the possible actions in each state, and the properties.

use stateright::{Model, Property};
use strum::{IntoStaticStr, VariantArray};
use vmferry_handover::{DestinationFinish, FinishWord, SourceFinish};

use super::action::Action;
use super::settle::Goal;
use super::world::{Domain, LibvirtCall, Message, SourceGuest, World};
use crate::explorer::Known;

pub(super) const ONCE: &str = "two hosts never run the guest";
pub(super) const NO_PAST: &str = "the guest never continues from an outdated state";
pub(super) const ENDS: &str = "in the end exactly one host has the guest or an operator is needed";
pub(super) const OPERATOR: &str = "an operator can always end it";
const TRUTH: &str = "no journal says that the wrong host has the guest";

/// The damages, the most serious first.
pub(super) const DAMAGES: [&str; 5] = [ONCE, NO_PAST, ENDS, OPERATOR, TRUTH];

/// A rule of the daemons, or an assumption about them, that is broken on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
pub enum BrokenFinish {
    /// No keeper holds libvirt's connection when the daemon at the source dies.
    #[strum(serialize = "the daemon at the source has no keeper")]
    NoKeeper,
    /// The keeper does not answer libvirt's keep-alive messages.
    #[strum(serialize = "the keeper answers no keep-alive messages")]
    NoKeepAlive,
    /// The keeper and the daemon at the source are dead at the same time. No rule prevents it.
    #[strum(serialize = "the keeper and the daemon at the source are dead at the same time")]
    NobodyKeeps,
    /// The daemon at the source lets libvirt's connection fail after SENT.
    #[strum(serialize = "the source's libvirt sees a broken connection after SENT")]
    ForwardsBreak,
    /// The daemon at the destination passes a Finish on after BARRED.
    #[strum(serialize = "a Finish is passed on after BARRED")]
    PassesAfterBarred,
    /// The daemon at the destination gives a word after PASSED without looking.
    #[strum(serialize = "after PASSED the word is given without looking")]
    SaysWithoutLooking,
    /// The daemon at the destination takes a guest that is gone for one that never ran.
    #[strum(serialize = "a guest that is gone is taken for one that never ran")]
    GoneIsDoesNotRun,
    /// A daemon bars sessions that it does not know.
    #[strum(serialize = "a daemon without the session's journal says that the guest does not run")]
    UnknownIsBarred,
    /// The daemon at the destination closes libvirt's connection when the link is lost.
    #[strum(serialize = "the destination gives up libvirt's reply when the link is lost")]
    DestinationGivesUp,
    /// The daemon at the source passes on that its libvirt has closed its connection.
    #[strum(serialize = "the end of the source's connection closes the destination's after SENT")]
    ForwardsEnd,
    /// An operator at the destination decides while its libvirt may still start the guest.
    #[strum(serialize = "an operator decides while the destination's libvirt works on Finish")]
    DecidesTooEarly,
    /// SENT is not synced.
    #[strum(serialize = "SENT is not synced before Finish is sent")]
    UnsyncedSent,
    /// PASSED is not synced.
    #[strum(serialize = "PASSED is not synced before Finish is passed on")]
    UnsyncedPassed,
    /// BARRED is not synced.
    #[strum(serialize = "BARRED is not synced before the answer")]
    UnsyncedBarred,
    /// ANSWERED of the destination is not synced.
    #[strum(serialize = "ANSWERED is not synced before the word is sent")]
    UnsyncedAnswered,
    /// ANSWERED of the source is not synced. This breaks nothing: the source asks again, and the
    /// word never changes.
    #[strum(serialize = "ANSWERED is not synced before the reply to the source's libvirt")]
    UnsyncedAnsweredAtSource,
}

impl BrokenFinish {
    /// All rules that are needed: breaking one does damage.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let needed = |rule: &Self| *rule != Self::UnsyncedAnsweredAtSource;
        Self::VARIANTS.iter().copied().filter(needed).collect()
    }

    /// The broken rule in words.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// The model of libvirt's Finish.
#[derive(Debug, Default)]
pub struct Finish {
    /// The broken rule, if any.
    pub broken: Option<BrokenFinish>,
    /// The only property to check; `None` checks all.
    pub only: Option<&'static str>,
    /// Whether operators act, also after faults end.
    pub(super) operators: bool,
    /// Fault-free states that are known to reach their goal, without and with operators.
    pub(super) settling: [Known<World>; 2],
}

impl Finish {
    pub(super) fn breaks(&self, rule: BrokenFinish) -> bool {
        self.broken == Some(rule)
    }

    fn source_actions(&self, world: &World, actions: &mut Vec<Action>) {
        let faults = !world.faults_ended;
        let unkept = self.breaks(BrokenFinish::NoKeeper) || self.breaks(BrokenFinish::NobodyKeeps);
        let Some(process) = &world.source.process else {
            actions.push(Action::SourceRestarts);
            if faults && world.keeper && self.breaks(BrokenFinish::NobodyKeeps) {
                actions.push(Action::KeeperDies);
            }
            return;
        };
        // Before SENT the connection may fail. After it the keeper and the daemon are not dead at
        // the same time.
        let before_sent = process.state == SourceFinish::NotSent && process.writing.is_none();
        if faults && (world.keeper || unkept || before_sent) {
            actions.push(Action::SourceDies { on_disk: false });
            if process.writing.is_some() {
                actions.push(Action::SourceDies { on_disk: true });
            }
        }
        if faults && process.writing.is_some() {
            for on_disk in [false, true] {
                actions.push(Action::SourceWriteFails { on_disk });
            }
        }
        if faults && world.keeper {
            actions.push(Action::KeeperDies);
        }
        if !world.keeper && world.source_connection && !self.breaks(BrokenFinish::NoKeeper) {
            actions.push(Action::KeeperHolds);
        }
        if process.writing.is_some() {
            actions.push(Action::SourceWrote);
        } else if process.todo.is_some() {
            actions.push(Action::SourceDoes);
        } else {
            let held = world.keeper || self.breaks(BrokenFinish::NoKeeper);
            if world.has_call && world.source_connection && held {
                actions.push(Action::SourceSends);
            }
            let may_break = process.state.may_break() || self.breaks(BrokenFinish::ForwardsBreak);
            if world.source_connection && may_break && (faults || !world.has_call) {
                actions.push(Action::SourceBreaks);
            }
            if process.state == SourceFinish::Sent {
                actions.push(Action::SourceAsks);
                if faults {
                    actions.push(Action::StrangerAnswers);
                }
            }
        }
    }

    fn source_libvirt_actions(world: &World, actions: &mut Vec<Action>) {
        match world.source_guest {
            SourceGuest::Waits if !world.source_connection => actions.push(Action::SourceSeesBreak),
            SourceGuest::Confirms(_) => actions.push(Action::SourceConfirms),
            _ => {}
        }
        if world.source_guest == SourceGuest::Waits && !world.faults_ended {
            actions.push(Action::SourceLibvirtRestarts);
        }
    }

    fn destination_actions(&self, world: &World, actions: &mut Vec<Action>) {
        let faults = !world.faults_ended;
        let Some(process) = &world.destination.process else {
            actions.push(Action::DestinationRestarts);
            return;
        };
        if faults {
            actions.push(Action::DestinationDies { on_disk: false });
            if process.writing.is_some() {
                actions.push(Action::DestinationDies { on_disk: true });
                for on_disk in [false, true] {
                    actions.push(Action::DestinationWriteFails { on_disk });
                }
            }
        }
        if process.writing.is_some() {
            actions.push(Action::DestinationWrote);
        } else if process.todo.is_some() {
            actions.push(Action::DestinationDoes);
        } else if world.libvirt_connection {
            if matches!(world.call, LibvirtCall::Replied(_)) {
                actions.push(Action::DestinationHears);
            }
            if process.state != DestinationFinish::Passed {
                actions.push(Action::DestinationCloses);
            }
            if faults && self.breaks(BrokenFinish::DestinationGivesUp) {
                actions.push(Action::DestinationGivesUp);
            }
        }
    }

    fn libvirt_actions(world: &World, actions: &mut Vec<Action>) {
        let faults = !world.faults_ended;
        if world.libvirt_runs {
            match world.call {
                LibvirtCall::Written => {
                    actions.push(Action::LibvirtBegins);
                    if !world.libvirt_connection {
                        actions.push(Action::LibvirtDrops);
                    }
                }
                LibvirtCall::Begun if world.domain == Domain::Waits => {
                    actions.push(Action::LibvirtStarts);
                    actions.push(Action::LibvirtFails);
                }
                LibvirtCall::Begun => actions.push(Action::LibvirtFails),
                LibvirtCall::None
                    if world.auto_destroy
                        && !world.libvirt_connection
                        && world.domain == Domain::Waits =>
                {
                    actions.push(Action::AutoDestroys);
                }
                LibvirtCall::None | LibvirtCall::Replied(_) => {}
            }
            if faults {
                actions.push(Action::LibvirtDies);
            }
        } else {
            actions.push(Action::LibvirtRestarts { kills: false });
            if world.domain == Domain::Waits {
                actions.push(Action::LibvirtRestarts { kills: true });
            }
        }
        if faults {
            match world.domain {
                Domain::Runs => actions.extend([Action::GuestMovesOn, Action::GuestEnds]),
                Domain::Waits => actions.push(Action::GuestEnds),
                _ => {}
            }
            actions.push(Action::HostIsLost);
        }
    }
}

impl Model for Finish {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![World::start(false), World::start(true)]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        self.source_actions(world, actions);
        Self::source_libvirt_actions(world, actions);
        if !world.lost {
            self.destination_actions(world, actions);
            Self::libvirt_actions(world, actions);
        }
        let arrives =
            |message: &&Message| !world.lost || !matches!(message, Message::Finish | Message::Ask);
        actions.extend(world.network.iter().filter(arrives).map(|m| Action::Deliver(*m)));
        if !world.faults_ended {
            actions.push(Action::FaultsEnd);
        }
        if self.operators || !world.faults_ended {
            self.operator_actions(world, actions);
        }
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let mut next = world.clone();
        self.apply(&mut next, action);
        (next != *world).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::always(ONCE, |_, world: &World| !world.runs_twice()),
            Property::always(NO_PAST, |_, world: &World| {
                world.source_guest != SourceGuest::Runs || !world.has_run_there()
            }),
            Property::always(ENDS, |model: &Self, world: &World| {
                !world.faults_ended || model.settles(world, Goal::OneOrOperator)
            }),
            Property::always(OPERATOR, |model: &Self, world: &World| {
                !world.faults_ended || model.settles(world, Goal::One)
            }),
            Property::always(TRUTH, |_, world: &World| world.journals_are_right()),
            Property::sometimes("the guest moves", |_, world: &World| {
                world.source_guest == SourceGuest::Killed && world.domain == Domain::Runs
            }),
            Property::sometimes("a Finish comes after BARRED", |_, world: &World| {
                world.destination.disk == DestinationFinish::Barred
                    && world.network.contains(&Message::Finish)
                    && world.source_guest == SourceGuest::Runs
            }),
            Property::sometimes("the source dies and the guest still moves", |_, world: &World| {
                world.source.process.is_none()
                    && world.source.disk == SourceFinish::Sent
                    && world.domain == Domain::Runs
                    && world.source_guest == SourceGuest::Waits
            }),
            Property::sometimes("an operator is needed", |_, world: &World| {
                world.faults_ended && world.waits_for_operator()
            }),
            Property::sometimes(
                "an operator resumes the destination's guest",
                |_, world: &World| {
                    world.domain == Domain::Runs
                        && !world.libvirt_connection
                        && world.reply_lost
                        && world.destination.disk == DestinationFinish::Answered(FinishWord::Runs)
                },
            ),
        ];
        properties.retain(|property| self.only.is_none_or(|only| property.name == only));
        properties
    }
}
