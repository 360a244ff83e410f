//! An exhaustive check of libvirt's Finish between two daemons.
//!
//! The daemons' steps are the production ones ([`SourceFinish`](vmferry_handover::SourceFinish)
//! and [`DestinationFinish`](vmferry_handover::DestinationFinish)). Around them are both libvirts,
//! the keeper of the source's connection, the journals, and a network that loses, delays, repeats
//! and reorders messages. Every process may die and restart at any point, also while it writes a
//! record, any number of times. The keeper and the daemon at the source are not dead at the same
//! time. A failed write is a death: the daemon continues from its journal. The guest at the
//! destination may end or move to a third host, and the destination's host may be lost
//! permanently. Each check runs without and with a keeper at the destination.
//!
//! The source's libvirt kills its guest after a successful reply. It resumes it after an error or
//! a failed connection. If it restarts while it waits, it leaves the guest paused. If it restarts
//! after the reply, it continues by the reply. The destination's libvirt, restarted, kills or
//! keeps a guest that has not run.
//!
//! Checked in every reachable state:
//! 1. Two hosts never run the guest.
//! 2. The guest never runs at the source after it ran at the destination.
//! 3. After faults end, exactly one host ends up with the guest, or the state is one in which an
//!    operator must decide ([`World::waits_for_operator`]).
//! 4. In such a state an operator who says the truth, or follows the source's journal, ends it.

mod action;
mod model;
mod settle;
mod steps;
mod world;

use stateright::{Checker, Expectation, HasDiscoveries, Model, Property};

pub use self::action::Action;
pub use self::model::{BrokenFinish, Finish};
use self::model::{ENDS, Goal, NO_PAST, ONCE, OPERATOR};
pub use self::world::{Daemon, Domain, LibvirtCall, Message, Process, SourceGuest, World};
use crate::report::{Finding, Outcome};

/// Explores the whole state space. With a broken rule, explores it until the most serious damage is
/// found.
#[must_use]
pub fn check(broken: Option<BrokenFinish>) -> Outcome {
    if broken.is_some() {
        let damages = [ONCE, NO_PAST, ENDS, OPERATOR];
        let mut outcomes = damages.into_iter().map(|property| explore(broken, Some(property)));
        let last = outcomes.next_back();
        return outcomes.find(|outcome| !outcome.violations.is_empty()).or(last).expect("damages");
    }
    explore(None, None)
}

fn explore(broken: Option<BrokenFinish>, only: Option<&'static str>) -> Outcome {
    let model = Finish { broken, only, ..Finish::default() };
    let properties = model.properties();
    let finish = if broken.is_some() { HasDiscoveries::AnyFailures } else { HasDiscoveries::All };
    let checker = model.checker().threads(1).finish_when(finish).spawn_bfs().join();
    let found = checker.discoveries();
    let missing = |property: &&Property<Finish>| {
        property.expectation == Expectation::Sometimes && !found.contains_key(property.name)
    };
    Outcome {
        states: checker.unique_state_count(),
        transitions: checker.state_count(),
        depth: checker.max_depth(),
        violations: properties
            .iter()
            .filter(|property| property.expectation == Expectation::Always)
            .filter_map(|property| finding(&checker, property.name))
            .collect(),
        missing: properties.iter().filter(missing).map(|property| property.name).collect(),
    }
}

/// The path to a violation of one property. With one property it is the shortest.
fn finding(checker: &impl Checker<Finish>, property: &'static str) -> Option<Finding> {
    let path = checker.discovery(property)?;
    let last = path.last_state().clone();
    let mut steps: Vec<String> = path.into_actions().iter().map(ToString::to_string).collect();
    let goal = match property {
        ENDS => Some(Goal::OneOrOperator),
        OPERATOR => Some(Goal::One),
        _ => None,
    };
    let end = if let Some(goal) = goal {
        let (rest, end) = checker.model().path_to_dead_end(&last, goal);
        steps.extend(rest.iter().map(ToString::to_string));
        format!("permanently: {}", end.who_has_the_guest())
    } else {
        last.who_has_the_guest()
    };
    Some(Finding { property, steps, end })
}
