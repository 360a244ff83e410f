//! Mistakes of a driver.

use vm_memory::GuestAddress;

use crate::QueueKind;

/// A mistake of the driver, or a failure of the host. Each kind is reported once in a device's
/// lifetime, so that a guest cannot fill a log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Warning {
    /// A ring is invalid. The queue is not used until the device is reset.
    #[error("the {queue} is broken: {reason}")]
    QueueBroken {
        /// The queue.
        queue: QueueKind,
        /// The problem.
        reason: &'static str,
    },
    /// A descriptor chain that does not end, or is otherwise malformed. It is returned without
    /// effect.
    #[error("a buffer in the {queue} is malformed: {reason}")]
    BadChain {
        /// The queue.
        queue: QueueKind,
        /// The problem.
        reason: &'static str,
    },
    /// A buffer of the wrong length. Bytes after the last whole entry are ignored.
    #[error("a buffer in the {queue} has {bytes} bytes")]
    BadLength {
        /// The queue.
        queue: QueueKind,
        /// The buffer's length.
        bytes: u64,
    },
    /// Device-writable descriptors instead of device-readable ones, or the reverse. They are
    /// ignored.
    #[error("a buffer in the {queue} has descriptors of the wrong direction")]
    WrongDirection {
        /// The queue.
        queue: QueueKind,
    },
    /// A range that is not entirely guest memory. The part outside is cut off.
    #[error(
        "{bytes} bytes at {start:#x} in the {queue} are not all in guest memory",
        start = start.0
    )]
    OutsideMemory {
        /// The queue.
        queue: QueueKind,
        /// The range's first byte.
        start: GuestAddress,
        /// Its length.
        bytes: u64,
    },
    /// A range that does not begin and end at page boundaries. Only the whole pages within it are
    /// used.
    #[error("{bytes} bytes at {start:#x} in the {queue} are not whole pages", start = start.0)]
    PartialPage {
        /// The queue.
        queue: QueueKind,
        /// The range's first byte.
        start: GuestAddress,
        /// Its length.
        bytes: u64,
    },
    /// An unexpected command during a round of hints. It ends the round.
    #[error("command {command} amid the hints of command {current}")]
    UnexpectedCommand {
        /// The command that the driver sent.
        command: u32,
        /// The command that was expected, if not STOP.
        current: u32,
    },
    /// A second statistics buffer before the first was used. The first is returned.
    #[error("more than one buffer for statistics")]
    SecondStatistics,
    /// The host could not discard a range.
    #[error("discarding {bytes} bytes at {start:#x} failed: {kind}", start = start.0)]
    DiscardFailed {
        /// The range's first byte.
        start: GuestAddress,
        /// Its length.
        bytes: u64,
        /// The system's error.
        kind: std::io::ErrorKind,
    },
}

impl Warning {
    /// The kind's bit in the device's record of reported warnings.
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
