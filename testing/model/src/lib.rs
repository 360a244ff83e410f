//! The handover, checked exhaustively.
//!
//! The model is a source and a destination whose every step is the engine's own transition function
//! ([`SourceState::step`](vmferry_handover::SourceState::step) and
//! [`DestinationState::step`](vmferry_handover::DestinationState::step)), each with a journal that
//! outlives its process, and a network that loses, delays, repeats and reorders. At any point either
//! process may die and come back, a journal's write may fail with or without the record on disk, the
//! link may be noticed to be lost or not, somebody who knows nothing may answer in the destination's
//! place, and the destination's host may be lost for good. No fault is counted: there is no bound
//! on how many of them come.
//!
//! What is checked in every state that can be reached:
//! 1. Two hosts never run the guest at the same time.
//! 2. The guest never goes on from a past: once it has run at the destination it never runs at the
//!    source again, and the destination never runs what the source has run on from.
//! 3. From the moment on when faults end (both processes come back, nothing more is lost), whatever
//!    was lost until then, exactly one host ends up with the guest: there is always a way there, so
//!    that a fair schedule finds it.
//!
//! All of this twice: for a guest that dies with the process that received it, as a microvm's does,
//! and for one that outlives that process, as a QEMU does. Such a guest must run in the end, and
//! may have been moved on before the process comes back.
//!
//! An operator who decides a handover in doubt is taken to have looked: the model lets one say
//! only what is true.
//!
//! [`Broken`] breaks one rule at a time, which shows that the checks can fail and prints how.

mod action;
mod effects;
mod model;
mod report;
mod settle;
mod world;

pub use action::Action;
pub use model::{Broken, Handover};
pub use report::{Finding, Outcome, check};
pub use world::{Destination, DestinationGuest, Message, Source, SourceGuest, World};
