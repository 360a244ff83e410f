//! What a driver can do wrong.

use vm_memory::GuestAddress;

use crate::QueueKind;

/// Something that the driver did wrong, or the host. Each kind is told once in a device's life, so that a
/// guest can't fill a log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Warning {
    /// A ring can't be followed; the queue is not looked at any more until the device is reset.
    #[error("the {queue} is broken: {reason}")]
    QueueBroken {
        /// The queue.
        queue: QueueKind,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A descriptor chain that does not end, or is otherwise malformed. It is given back without effect.
    #[error("a buffer in the {queue} is malformed: {reason}")]
    BadChain {
        /// The queue.
        queue: QueueKind,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A buffer of the wrong size: what it holds beyond whole entries is ignored.
    #[error("a buffer in the {queue} has {bytes} bytes")]
    BadLength {
        /// The queue.
        queue: QueueKind,
        /// The buffer's length.
        bytes: u64,
    },
    /// Descriptors for writing where there should be such for reading, or the other way round. Ignored.
    #[error("a buffer in the {queue} has descriptors of the wrong direction")]
    WrongDirection {
        /// The queue.
        queue: QueueKind,
    },
    /// A range that is not all guest memory. What is outside is cut off.
    #[error("{bytes} bytes at {start:#x} in the {queue} are not all in guest memory", start = start.0)]
    OutsideMemory {
        /// The queue.
        queue: QueueKind,
        /// The range's first byte.
        start: GuestAddress,
        /// Its length.
        bytes: u64,
    },
    /// A range that does not begin and end at a page. The pages that are in it whole are taken.
    #[error("{bytes} bytes at {start:#x} in the {queue} are not whole pages", start = start.0)]
    PartialPage {
        /// The queue.
        queue: QueueKind,
        /// The range's first byte.
        start: GuestAddress,
        /// Its length.
        bytes: u64,
    },
    /// A command in the middle of a round of hints that does not belong there. It ends the round.
    #[error("command {command} amid the hints of command {current}")]
    UnexpectedCommand {
        /// What the driver sent.
        command: u32,
        /// What it should have sent, if not STOP.
        current: u32,
    },
    /// A second buffer for statistics while the first is not used. The first is given back.
    #[error("more than one buffer for statistics")]
    SecondStatistics,
    /// The host could not discard a range.
    #[error("discarding {bytes} bytes at {start:#x} failed: {kind}", start = start.0)]
    DiscardFailed {
        /// The range's first byte.
        start: GuestAddress,
        /// Its length.
        bytes: u64,
        /// What the system said.
        kind: std::io::ErrorKind,
    },
}

impl Warning {
    /// The kind's place in the device's book of what it has told.
    pub(crate) fn bit(&self) -> u32 {
        1 << match self {
            Self::QueueBroken { .. } => 0,
            Self::BadChain { .. } => 1,
            Self::BadLength { .. } => 2,
            Self::WrongDirection { .. } => 3,
            Self::OutsideMemory { .. } => 4,
            Self::PartialPage { .. } => 5,
            Self::UnexpectedCommand { .. } => 6,
            Self::SecondStatistics => 7,
            Self::DiscardFailed { .. } => 8,
        }
    }
}
