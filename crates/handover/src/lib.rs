//! The handover: who may run the guest, decided by two small pure machines.
//!
//! Neither machine does I/O. Each takes one event, changes its state and names the effects that
//! the driver must carry out, in order. The engine, the simulator and the model checker use exactly
//! these transition functions. [`journal`] keeps what was promised on disk; [`SourceGuest`] is the
//! guest at the source in types, so that one that was promised away has no method that resumes it.
//!
//! ```text
//!   source                                             destination
//!
//!   Holding  --Final(state, digest)------------------> Receiving
//!      |                                                  | state loaded, digests agree
//!      |  <---------------------------------READY------ Ready
//!   Committing   journal COMMIT                           |
//!      |                                                  |
//!   Committed --COMMIT-------------------------------> IntentWriting   journal RUN-INTENT
//!      |                                                  |
//!      |  <-------------------------------RUNNING------ Owns           run the guest
//!   Given
//!
//!   until COMMIT is journalled: any failure            until RUN-INTENT is journalled: any failure
//!   -> Kept, the guest resumes                         -> AbortWriting -> Aborted, never runs
//!   after it: link lost -> InDoubt, asks               while Ready a lost link is no reason to
//!   until the word is Owns or Aborted                  abort before the commit time-out
//! ```
//!
//! The invariants:
//! 1. The source lets the guest run only in `Holding` and `Kept`.
//! 2. The source enters `Kept` from a committed state only on the destination's journalled word
//!    `Aborted`, or on the operator's order.
//! 3. The destination runs the guest only in `Owns`, which it enters only when RUN-INTENT is on
//!    disk.
//! 4. A destination's journal never holds both RUN-INTENT and ABORTED.
//! 5. A source that was restarted asks, and never sends COMMIT.
//! 6. A session that a destination does not know is not aborted: the word is `Unknown`.
//! 7. A guest may outlive the process that received it. A destination that is restarted runs it if
//!    RUN-INTENT is on disk and the guest has never run there, and throws it away after ABORTED.

#![forbid(unsafe_code)]

pub mod journal;

mod destination;
mod guest;
mod identity;
mod source;

pub use destination::{DestinationEffect, DestinationEvent, DestinationState, recover_destination};
pub use guest::{
    CommitWritten, Committed, Paused, Resume, Running, SourceGuest, VmError, write_commit,
};
pub use identity::{GuestIdentity, MAX_NAME_BYTES, SessionId, SessionWord};
pub use source::{OperatorWord, SourceEffect, SourceEvent, SourceState, recover_source};
