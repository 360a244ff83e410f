//! The handover: two small pure state machines decide which host may run the guest.
//!
//! Neither machine does I/O. Each takes one event, changes its state and returns the effects that
//! the driver must carry out, in order. The engine, the simulator and the model checker use the
//! same transition functions. [`journal`] keeps the promises on disk. [`SourceGuest`] is the guest
//! at the source as types: a committed guest has no method that resumes it.
//!
//! ```text
//!   source                                             destination
//!
//!   Holding  --Final(state, digest)------------------> Receiving
//!      |                                                  | digests agree, state loaded
//!      |  <---------------------------------READY------ Ready
//!   Committing   journal COMMIT                           |
//!      |                                                  |
//!   Committed --COMMIT-------------------------------> Claiming        ask the witness, if any
//!      |                                               IntentWriting   journal RUN-INTENT
//!      |                                                  |
//!      |  <-------------------------------RUNNING------ Owns           run the guest
//!   Given
//!
//!   With post-copy the guest runs before every page is there:
//!
//!   Committed --COMMIT-------------------------------> Claiming, IntentWriting
//!      |                                                  | journal RUN-INTENT-POST-COPY
//!      |                                                  |
//!      |  <------------------------------FETCHING------ Fetching       run the guest
//!   Serving      journal SERVING                          | every page is placed
//!      |                                                FetchedWriting   journal FETCHED
//!      |  <-------------------------------RUNNING------ Owns
//!   Given
//!
//!   If the guest crashes there while it lacks pages, its memory at the source is kept:
//!
//!      |                                                EndedWriting   journal ENDED
//!      |  <---------------------------------ENDED------ Ended
//!   Ended        until the operator gives the guest up -> Given
//!
//!   until COMMIT is journaled: any failure             until RUN-INTENT is journaled: any failure
//!   -> Kept, the guest resumes                         -> AbortWriting -> Aborted, never runs
//!   after it: link lost -> InDoubt, asks               in Ready, a lost link does not abort before
//!   until the word is Owns or Aborted                  the COMMIT timeout
//! ```
//!
//! The invariants:
//! 1. The source lets the guest run only in `Holding` and `Kept`.
//! 2. The source enters `Kept` from a committed state only after the destination's journaled word
//!    `Aborted`, after the witness has given the guest back, or on the operator's order.
//! 3. The destination runs the guest only in `Owns`, `Fetching` and `FetchedWriting`, which it
//!    enters only when RUN-INTENT is on disk. From there on the guest is the destination's, also
//!    when it has crashed (`EndedWriting`, `Ended`).
//! 4. A destination's journal never holds both RUN-INTENT and ABORTED.
//! 5. A restarted source asks, and never sends COMMIT.
//! 6. A session that a destination does not know is not aborted: the word is `Unknown`.
//! 7. A guest may outlive the process that received it. A restarted destination runs the guest if
//!    RUN-INTENT is on disk and the guest has never run there, and discards it after ABORTED.
//! 8. RUNNING and the word `Owns` mean that the destination needs nothing of the source. A guest
//!    that lacks pages is `Fetching`, and the source keeps its memory in `Serving`, which ends only
//!    with RUNNING, `Owns`, or the operator's order to give the guest up.
//! 9. The word `Ended` means that the guest has crashed while it lacked pages. It frees nothing:
//!    only the operator's order does.
//! 10. With a witness the destination writes RUN-INTENT only after the witness has granted its
//!     claim. An unanswered request is neither granted nor refused. See [`Register`].

#![forbid(unsafe_code)]

pub mod journal;

mod destination;
mod finish;
mod guest;
mod identity;
mod source;
mod witness;

pub use destination::{
    DestinationEffect, DestinationEvent, DestinationRecords, DestinationState, recover_destination,
};
pub use finish::{
    DestinationAction, DestinationFinish, DestinationStep, DomainSeen, FinishAnswer, FinishEntry,
    FinishError, FinishOwner, FinishRecord, FinishStep, FinishWord, SourceAction, SourceFinish,
    SourceStep,
};
pub use guest::{
    CommitWritten, Committed, Paused, Reconnect, Resume, Running, SourceGuest, VmError,
    write_commit,
};
pub use identity::{GuestIdentity, MAX_NAME_BYTES, SessionId, SessionKind, SessionWord};
pub use source::{
    OperatorWord, SourceEffect, SourceEvent, SourceRecords, SourceState, recover_source,
};
pub use witness::{BadWitnessId, MAX_WITNESS_BYTES, Register, WitnessId, WitnessRequest};
