//! What may happen next.

use std::fmt;

use vmferry_handover::{DestinationEffect, OperatorWord, SourceEffect};

use crate::world::{DestinationRecord, Message};

/// One thing that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The destination takes the announced guest and begins to write OPEN.
    DestinationOpens,
    /// The source pauses the guest and sends everything.
    SourceSendsAll,
    /// A message arrives. It may arrive again.
    Deliver(Message),
    /// Somebody who knows nothing of the session answers in the destination's place.
    StrangerAnswers,
    /// The source does the next thing that it has to do. `fails`: an outcome is not written.
    SourceDoes {
        /// What it does.
        effect: SourceEffect,
        /// Whether it fails, if it can.
        fails: bool,
    },
    /// The destination does the next thing that it has to do.
    DestinationDoes(DestinationEffect),
    /// The source's write of COMMIT returns.
    SourceWrote {
        /// Whether it returns an error.
        fails: bool,
        /// Whether the record is on disk.
        on_disk: bool,
    },
    /// A write of the destination returns.
    DestinationWrote {
        /// Which record.
        record: DestinationRecord,
        /// Whether it returns an error.
        fails: bool,
        /// Whether the record is on disk.
        on_disk: bool,
    },
    /// The source notices that the link is lost, or silent, or that an answer does not come.
    SourceLosesLink,
    /// The source fails or is cancelled.
    SourceFails,
    /// The destination notices that the link is lost.
    DestinationLosesLink,
    /// The destination fails or is cancelled.
    DestinationFails,
    /// The destination has waited for COMMIT for as long as it may.
    CommitTimesOut,
    /// The source's process dies. `on_disk`: what it was writing is on disk.
    SourceCrashes {
        /// Whether the record is on disk.
        on_disk: bool,
    },
    /// The destination's process dies.
    DestinationCrashes {
        /// Whether the record is on disk.
        on_disk: bool,
    },
    /// The source's process comes back.
    SourceRestarts,
    /// The destination's process comes back.
    DestinationRestarts,
    /// The destination's host is lost for good.
    DestinationIsLost,
    /// The guest that runs at the destination is moved to a third host by another session.
    GuestMovesOn,
    /// The operator decides.
    OperatorSays(OperatorWord),
    /// From now on there are no faults; what was on its way is lost.
    FaultsEnd,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let disk = |on_disk: bool| {
            if on_disk { "the record is on disk" } else { "the record is not on disk" }
        };
        match self {
            Self::DestinationOpens => f.write_str("destination: takes the guest, writes OPEN"),
            Self::SourceSendsAll => f.write_str("source: pauses the guest, sends FINAL"),
            Self::Deliver(message) => {
                let to = if message.is_to_destination() { "destination" } else { "source" };
                write!(f, "{to}: hears {message:?}")
            }
            Self::StrangerAnswers => f.write_str("stranger: answers that it knows no such session"),
            Self::SourceDoes { effect, fails: false } => write!(f, "source: does {effect:?}"),
            Self::SourceDoes { effect, fails: true } => write!(f, "source: fails to {effect:?}"),
            Self::DestinationDoes(effect) => write!(f, "destination: does {effect:?}"),
            Self::SourceWrote { fails: false, .. } => f.write_str("source: COMMIT is on disk"),
            Self::SourceWrote { fails: true, on_disk } => {
                write!(f, "source: writing COMMIT fails, {}", disk(*on_disk))
            }
            Self::DestinationWrote { record, fails: false, .. } => {
                write!(f, "destination: {record:?} is on disk")
            }
            Self::DestinationWrote { record, fails: true, on_disk } => {
                write!(f, "destination: writing {record:?} fails, {}", disk(*on_disk))
            }
            Self::SourceLosesLink => f.write_str("source: link lost, or a wait timed out"),
            Self::SourceFails => f.write_str("source: fails or is cancelled"),
            Self::DestinationLosesLink => f.write_str("destination: link lost"),
            Self::DestinationFails => f.write_str("destination: fails or is cancelled"),
            Self::CommitTimesOut => f.write_str("destination: no COMMIT came in time"),
            Self::SourceCrashes { on_disk } => {
                write!(f, "source: its process dies ({} if it was writing)", disk(*on_disk))
            }
            Self::DestinationCrashes { on_disk } => {
                write!(f, "destination: its process dies ({} if it was writing)", disk(*on_disk))
            }
            Self::SourceRestarts => f.write_str("source: its process comes back"),
            Self::DestinationRestarts => f.write_str("destination: its process comes back"),
            Self::DestinationIsLost => f.write_str("destination: its host is lost for good"),
            Self::GuestMovesOn => f.write_str("destination: the guest is moved to a third host"),
            Self::OperatorSays(word) => write!(f, "operator: says {word:?}"),
            Self::FaultsEnd => f.write_str("faults end; what was on its way is lost"),
        }
    }
}
