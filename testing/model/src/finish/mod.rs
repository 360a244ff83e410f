//! An exhaustive check of libvirt's Finish between two daemons.
//!
//! The daemons' steps are the production ones ([`SourceFinish`](vmferry_handover::SourceFinish)
//! and [`DestinationFinish`](vmferry_handover::DestinationFinish)). Around them are both libvirts,
//! the keeper of the source's connection, the journals, and a network that loses, delays, repeats
//! and reorders messages. Every process may die and restart at any point, also while it writes a
//! record, any number of times. The keeper and the daemon at the source are not dead at the same
//! time. After a failed write the daemon continues from its journal, and knows what it has not
//! done. The guest at the destination may end or move to a third host, and the destination's host
//! may be lost permanently. Each check runs without and with a keeper at the destination.
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
//! 4. In such a state an operator who says the truth, or follows a journal, ends it, and no paused
//!    copy of the guest is left.
//! 5. What each journal says about who has the guest is true
//!    ([`SourceFinish::owner`](vmferry_handover::SourceFinish::owner),
//!    [`DestinationFinish::owner`](vmferry_handover::DestinationFinish::owner)).

mod action;
mod failures;
mod model;
mod operator;
mod settle;
mod steps;
mod world;

use stateright::HasDiscoveries;

pub use self::action::Action;
use self::model::DAMAGES;
pub use self::model::{BrokenFinish, Finish};
pub use self::world::{Daemon, Domain, LibvirtCall, Message, Process, SourceGuest, World};
use crate::explorer::explore;
use crate::report::Outcome;

/// Explores the whole state space. With a broken rule, explores it until the most serious damage is
/// found.
#[must_use]
pub fn check(broken: Option<BrokenFinish>) -> Outcome {
    let finish = |only| Finish { broken, only, ..Finish::default() };
    if broken.is_none() {
        return explore(finish(None), HasDiscoveries::All);
    }
    let mut outcomes = DAMAGES
        .into_iter()
        .map(|property| explore(finish(Some(property)), HasDiscoveries::AnyFailures));
    let last = outcomes.next_back();
    outcomes.find(|outcome| !outcome.violations.is_empty()).or(last).expect("damages")
}
