//! What can go wrong in a schedule.

use std::time::Duration;

use super::step::Step;
use crate::host::Host;

/// The position of a cut relative to a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Where {
    /// Before the message: it is lost.
    Before,
    /// Within it: a part of it arrives.
    Within,
    /// After it has arrived.
    After,
}

/// The directions in which a silent network drops messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ways {
    /// To both hosts.
    Both,
    /// To one host.
    To(Host),
}

impl Ways {
    /// Whether messages to `host` are dropped.
    #[must_use]
    pub fn cover(self, host: Host) -> bool {
        self == Self::Both || self == Self::To(host)
    }
}

/// The effect of a failed journal write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteFault {
    /// Nothing of it is on disk.
    Lost,
    /// A part of the line is on disk.
    Torn,
    /// All of it is on disk, although the write failed.
    OnDisk,
}

/// A call into a VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmCall {
    /// The source pauses the guest.
    Pause,
    /// The source saves its state.
    Save,
    /// The source resumes it, and must be asked again.
    Resume,
    /// The source creates a compressor.
    Compress,
    /// The destination allocates its memory.
    Prepare,
    /// The destination loads its state.
    Load,
    /// The destination starts it: the guest crashes.
    Run,
}

/// One fault. Messages are counted from 0 over all channels, in the order in which they are sent.
#[allow(missing_docs, reason = "each variant says what its fields are")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// All channels are cut, or only the message's, and none can be opened for some time.
    Cut { message: u64, place: Where, all: bool, away: Duration },
    /// From this message on the network is silent. Messages sent then arrive when the silence ends,
    /// unless they are lost.
    Silence { message: u64, ways: Ways, lasts: Duration, lost: bool },
    /// The message arrives twice.
    Repeat { message: u64 },
    /// The message, and the rest of its channel, is late.
    Delay { message: u64, by: Duration },
    /// A bit of the message is flipped.
    Damage { message: u64, bit: u32 },
    /// A host's process dies when the message is sent, and is restarted.
    Crash { host: Host, message: u64, back_after: Duration },
    /// The guest crashes, if it runs at the destination, lacks pages and is in a process of its
    /// own.
    GuestCrash { message: u64 },
    /// The user cancels.
    Cancel { host: Host, message: u64 },
    /// For some time another host answers at the destination's address, and does not know the
    /// session.
    Stranger { message: u64, lasts: Duration },
    /// In addition to the message, the session's control channel delivers the message of this
    /// number to a host: its peer violates the protocol.
    Forge { message: u64, to: Host, number: u16 },
    /// A write to a journal fails. Writes are counted from 0 for each host. With `crash` the
    /// process dies with it.
    Write { host: Host, number: u64, how: WriteFault, crash: bool },
    /// A VMM's call fails.
    Vm { call: VmCall },
    /// Hosts are cut off from the witness: requests are lost, or only answers.
    WitnessCut { message: u64, ways: Ways, lasts: Duration, answers_only: bool },
    /// The witness takes up to several seconds for each request and each answer.
    WitnessSlow { message: u64, lasts: Duration },
    /// The data of the witness is lost, or replaced by a backup.
    WitnessLost { message: u64 },
    /// A step takes this long, once: the process handles no events meanwhile.
    Slow { step: Step, takes: Duration },
}

impl Fault {
    /// The message at which the fault happens, if it is bound to one.
    #[must_use]
    pub fn message(&self) -> Option<u64> {
        match *self {
            Self::Cut { message, .. }
            | Self::Silence { message, .. }
            | Self::Repeat { message }
            | Self::Delay { message, .. }
            | Self::Damage { message, .. }
            | Self::Crash { message, .. }
            | Self::GuestCrash { message }
            | Self::Cancel { message, .. }
            | Self::Forge { message, .. }
            | Self::WitnessCut { message, .. }
            | Self::WitnessSlow { message, .. }
            | Self::WitnessLost { message }
            | Self::Stranger { message, .. } => Some(message),
            Self::Write { .. } | Self::Vm { .. } | Self::Slow { .. } => None,
        }
    }
}
