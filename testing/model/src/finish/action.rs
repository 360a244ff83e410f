//! The actions of the model of libvirt's Finish.

use std::fmt;

use vmferry_handover::OperatorWord;

use super::world::Message;

/// One step of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The daemon at the source gives the keeper a duplicate of libvirt's connection.
    KeeperHolds,
    /// The daemon at the source begins to send the Finish.
    SourceSends,
    /// The daemon at the source asks.
    SourceAsks,
    /// The daemon at the source lets libvirt's connection fail.
    SourceBreaks,
    /// The daemon at the source has its record on disk.
    SourceWrote,
    /// The daemon at the source does its next action.
    SourceDoes,
    /// A message arrives. It may arrive again.
    Deliver(Message),
    /// A host that does not know the session answers.
    StrangerAnswers,
    /// The daemon at the destination has its record on disk.
    DestinationWrote,
    /// The daemon at the destination does its next action.
    DestinationDoes,
    /// The daemon at the destination receives libvirt's reply.
    DestinationHears,
    /// A write of the daemon at the source fails.
    SourceWriteFails {
        /// Whether the record is on disk.
        on_disk: bool,
    },
    /// A write of the daemon at the destination fails.
    DestinationWriteFails {
        /// Whether the record is on disk.
        on_disk: bool,
    },
    /// The daemon at the destination closes its connection because the link was lost.
    DestinationGivesUp,
    /// The daemon at the destination closes its connection while no reply is awaited on it.
    DestinationCloses,
    /// The destination's libvirt reads the Finish.
    LibvirtBegins,
    /// The destination's libvirt starts the guest's CPUs and replies.
    LibvirtStarts,
    /// The destination's libvirt fails, kills its QEMU and replies.
    LibvirtFails,
    /// The destination's libvirt drops a Finish whose connection is closed.
    LibvirtDrops,
    /// The destination's libvirt destroys the guest of a closed connection.
    AutoDestroys,
    /// The source's libvirt kills or resumes its guest.
    SourceConfirms,
    /// The source's libvirt sees its connection fail.
    SourceSeesBreak,
    /// The daemon at the source dies.
    SourceDies {
        /// Whether the record that was being written is on disk.
        on_disk: bool,
    },
    /// The daemon at the source restarts.
    SourceRestarts,
    /// The keeper dies.
    KeeperDies,
    /// The daemon at the destination dies.
    DestinationDies {
        /// Whether the record that was being written is on disk.
        on_disk: bool,
    },
    /// The daemon at the destination restarts.
    DestinationRestarts,
    /// The source's libvirt dies and restarts.
    SourceLibvirtRestarts,
    /// The destination's libvirt dies.
    LibvirtDies,
    /// The destination's libvirt restarts.
    LibvirtRestarts {
        /// Whether it kills a guest that has not run.
        kills: bool,
    },
    /// The guest at the destination is moved to a third host.
    GuestMovesOn,
    /// The guest at the destination ends, or its QEMU dies before it ran.
    GuestEnds,
    /// The destination's host is lost permanently.
    HostIsLost,
    /// An operator decides at the source.
    OperatorAtSource(OperatorWord),
    /// An operator decides at the destination.
    OperatorAtDestination(OperatorWord),
    /// An operator resumes or destroys the guest that the source's libvirt has left paused.
    OperatorEndsPause(OperatorWord),
    /// An operator sends the word to the source's libvirt, on the connection that the keeper holds.
    OperatorReplies,
    /// An operator resumes the guest that is paused at the destination.
    OperatorResumes,
    /// An operator destroys the guest that is paused at the destination.
    OperatorDestroys,
    /// Faults stop from now on. Messages in flight are lost.
    FaultsEnd,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::KeeperHolds => "source: the keeper holds libvirt's connection",
            Self::SourceSends => "source: begins to send Finish",
            Self::SourceAsks => "source: asks",
            Self::SourceBreaks => "source: lets libvirt's connection fail",
            Self::SourceWrote => "source: the record is on disk",
            Self::SourceDoes => "source: acts on its state",
            Self::Deliver(message @ (Message::Finish | Message::Ask)) => {
                return write!(f, "destination: receives {message:?}");
            }
            Self::Deliver(message) => return write!(f, "source: receives {message:?}"),
            Self::StrangerAnswers => "stranger: answers about a session that it does not know",
            Self::DestinationWrote => "destination: the record is on disk",
            Self::DestinationDoes => "destination: acts on its state",
            Self::DestinationHears => "destination: receives libvirt's reply",
            Self::SourceWriteFails { on_disk } => {
                return write!(f, "source: a write fails{}", record(*on_disk));
            }
            Self::DestinationWriteFails { on_disk } => {
                return write!(f, "destination: a write fails{}", record(*on_disk));
            }
            Self::DestinationGivesUp => "destination: gives libvirt's connection up",
            Self::DestinationCloses => "destination: closes libvirt's connection",
            Self::LibvirtBegins => "destination's libvirt: begins Finish",
            Self::LibvirtStarts => "destination's libvirt: starts the guest and replies",
            Self::LibvirtFails => "destination's libvirt: kills the guest and replies",
            Self::LibvirtDrops => "destination's libvirt: drops Finish",
            Self::AutoDestroys => "destination's libvirt: destroys the guest of a lost connection",
            Self::SourceConfirms => "source's libvirt: ends the migration by the reply",
            Self::SourceSeesBreak => "source's libvirt: sees its connection fail",
            Self::SourceDies { on_disk } => {
                return write!(f, "source: the daemon dies{}", record(*on_disk));
            }
            Self::SourceRestarts => "source: the daemon restarts",
            Self::KeeperDies => "source: the keeper dies",
            Self::DestinationDies { on_disk } => {
                return write!(f, "destination: the daemon dies{}", record(*on_disk));
            }
            Self::DestinationRestarts => "destination: the daemon restarts",
            Self::SourceLibvirtRestarts => "source's libvirt: dies and restarts",
            Self::LibvirtDies => "destination's libvirt: dies",
            Self::LibvirtRestarts { .. } => "destination's libvirt: restarts",
            Self::GuestMovesOn => "destination: the guest moves to a third host",
            Self::GuestEnds => "destination: the guest's QEMU ends",
            Self::HostIsLost => "destination: its host is lost permanently",
            Self::OperatorAtSource(word) => return write!(f, "operator at the source: {word:?}"),
            Self::OperatorAtDestination(word) => {
                return write!(f, "operator at the destination: {word:?}");
            }
            Self::OperatorEndsPause(word) => {
                return write!(f, "operator at the source's libvirt: {word:?}");
            }
            Self::OperatorReplies => "operator at the source: sends the word to libvirt",
            Self::OperatorResumes => "operator at the destination: resumes the guest",
            Self::OperatorDestroys => "operator at the destination: destroys the paused guest",
            Self::FaultsEnd => "faults end; messages in flight are lost",
        };
        f.write_str(text)
    }
}

fn record(on_disk: bool) -> &'static str {
    if on_disk { ", and the record is on disk" } else { "" }
}
