//! An exhaustive check of the handover.
//!
//! The model is a source and a destination whose every step is the engine's own transition function
//! ([`SourceState::step`](vmferry_handover::SourceState::step) and
//! [`DestinationState::step`](vmferry_handover::DestinationState::step)). Each side has a journal
//! that outlives its process. The network loses, delays, repeats and reorders messages. At any
//! point either process may die and restart, a journal write may fail with or without the record on
//! disk, a lost link may be detected or not, a host that does not know the session may answer in
//! the destination's place, and the destination's host may be lost permanently. The number of
//! faults is not bounded.
//!
//! Checked in every reachable state:
//! 1. Two hosts never run the guest at the same time.
//! 2. The guest never continues from an outdated state: once it has run at the destination it never
//!    runs at the source again, and the destination never runs a state from which the source has
//!    continued.
//! 3. The source frees no page that the guest at the destination still lacks.
//! 4. After faults end (both processes restart and no more messages are lost), whatever was lost
//!    until then, exactly one host ends up with the guest. From each state some path leads there,
//!    so that a fair schedule finds it.
//!
//! Each check runs for two kinds of guest: one that dies with the process that received it, like a
//! microvm's, and one that outlives that process, like a QEMU guest. The second kind must run in
//! the end, and may have moved on before the process restarts. And it runs for both kinds of
//! session: with pre-copy alone, and with post-copy, in which the guest runs at the destination
//! before it has all pages.
//!
//! A session may have a witness ([`Witness`]): a register that the destination must claim the guest
//! in, and in which a source in doubt takes it back. Requests to it are delayed, repeated and lost
//! like messages, either host may be cut off from it, its data may be lost or replaced by a backup,
//! and leases end at any time. The source's host may be fenced, and its guest started elsewhere.
//! With a witness two more things are checked: the handover is also decided if faults end and the
//! hosts still can't reach each other, and a guest that was not claimed comes back without an
//! operator if the destination's host is lost.
//!
//! Operators are assumed to have checked before they resolve a handover in doubt: the model lets
//! them say only what is true, and give a guest up only if its host is lost.
//!
//! [`finish`] is a second model: libvirt's Finish, which the daemons forward.
//!
//! [`BrokenRule`] breaks one rule at a time. This shows that the checks can fail, and prints how.

mod action;
mod effects;
mod explorer;
pub mod finish;
mod model;
mod report;
mod settle;
mod witness;
mod world;

pub use action::Action;
pub use model::{BrokenRule, Handover};
pub use report::{Finding, Outcome, check, check_with_witness, first_violation};
pub use witness::{Witness, WitnessAction};
pub use world::{Destination, DestinationGuest, Message, Source, SourceGuest, World};
