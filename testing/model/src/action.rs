//! The actions of the model.

use std::fmt;

use vmferry_handover::{DestinationEffect, OperatorWord, SourceEffect};

use crate::witness::WitnessAction;
use crate::world::{DestinationRecord, Message};

/// One step of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The destination accepts the announced guest and starts to write OPEN.
    DestinationOpens,
    /// The source pauses the guest and sends everything.
    SourceSendsAll,
    /// A message arrives. It may arrive again.
    Deliver(Message),
    /// A host that does not know the session answers in the destination's place.
    StrangerAnswers,
    /// The source carries out its next pending effect.
    SourceDoes {
        /// The effect.
        effect: SourceEffect,
        /// Whether a write of the outcome fails.
        fails: bool,
    },
    /// The destination carries out its next pending effect.
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
        /// The record.
        record: DestinationRecord,
        /// Whether it returns an error.
        fails: bool,
        /// Whether the record is on disk.
        on_disk: bool,
    },
    /// The source detects a lost or silent link, or a missing answer.
    SourceLosesLink,
    /// The source fails or is canceled.
    SourceFails,
    /// The destination detects that the link was lost.
    DestinationLosesLink,
    /// The destination fails or is canceled.
    DestinationFails,
    /// The destination's wait for COMMIT times out.
    CommitTimesOut,
    /// The source's process dies.
    SourceCrashes {
        /// Whether the record that was being written is on disk.
        on_disk: bool,
    },
    /// The destination's process dies.
    DestinationCrashes {
        /// Whether the record that was being written is on disk.
        on_disk: bool,
    },
    /// The source's process is restarted.
    SourceRestarts,
    /// The destination's process is restarted.
    DestinationRestarts,
    /// The destination's host is lost permanently.
    DestinationIsLost,
    /// The destination places the last page that the guest lacked.
    PagesArrive,
    /// The destination needs nothing of the source any more.
    DestinationHasAll,
    /// The guest crashes at the destination: its VMM, which may be a process of its own, ends.
    GuestCrashes,
    /// The destination notices that.
    DestinationNoticesCrash,
    /// Another session moves the guest that runs at the destination to a third host.
    GuestMovesOn,
    /// The operator decides.
    OperatorSays(OperatorWord),
    /// The operator gives up a guest that lacks pages, because it has crashed or its host is lost.
    OperatorGivesUp,
    /// A step that involves the witness.
    Witness(WitnessAction),
    /// Faults stop from now on. Messages in flight are lost.
    FaultsEnd {
        /// Whether the hosts can reach each other again.
        linked: bool,
    },
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let disk = |on_disk: bool| {
            if on_disk { "the record is on disk" } else { "the record is not on disk" }
        };
        match self {
            Self::DestinationOpens => f.write_str("destination: accepts the guest, writes OPEN"),
            Self::SourceSendsAll => f.write_str("source: pauses the guest, sends FINAL"),
            Self::Deliver(message) => {
                let to = if message.is_to_destination() { "destination" } else { "source" };
                write!(f, "{to}: receives {message:?}")
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
            Self::SourceFails => f.write_str("source: fails or is canceled"),
            Self::DestinationLosesLink => f.write_str("destination: link lost"),
            Self::DestinationFails => f.write_str("destination: fails or is canceled"),
            Self::CommitTimesOut => f.write_str("destination: no COMMIT came in time"),
            Self::SourceCrashes { on_disk } => {
                write!(f, "source: its process dies ({} if it was writing)", disk(*on_disk))
            }
            Self::DestinationCrashes { on_disk } => {
                write!(f, "destination: its process dies ({} if it was writing)", disk(*on_disk))
            }
            Self::SourceRestarts => f.write_str("source: its process restarts"),
            Self::DestinationRestarts => f.write_str("destination: its process restarts"),
            Self::DestinationIsLost => f.write_str("destination: its host is lost permanently"),
            Self::PagesArrive => f.write_str("destination: the last missing page arrives"),
            Self::DestinationHasAll => {
                f.write_str("destination: notices that it needs nothing of the source")
            }
            Self::GuestCrashes => f.write_str("destination: the guest crashes"),
            Self::DestinationNoticesCrash => {
                f.write_str("destination: notices that the guest has crashed")
            }
            Self::GuestMovesOn => f.write_str("destination: the guest is moved to a third host"),
            Self::OperatorSays(word) => write!(f, "operator: says {word:?}"),
            Self::OperatorGivesUp => f.write_str("operator: gives the guest up"),
            Self::Witness(action) => action.fmt(f),
            Self::FaultsEnd { linked: true } => {
                f.write_str("faults end; messages in flight are lost")
            }
            Self::FaultsEnd { linked: false } => f.write_str(
                "faults end but for the link between the hosts; messages in flight are lost",
            ),
        }
    }
}
