//! The phases of the source. Each owns the data that is needed only in it, or in a run of phases
//! that hand the data on, and is consumed by the step that leaves it.

use std::time::Duration;

use vmferry_memory::{GuestBytes, WholeHash};
use vmferry_wire::Token;

/// The present phase. The diagram in [`source`](super) has the order.
#[derive(Debug)]
pub(super) enum Phase {
    Announced(Announced),
    Joining(Joining),
    Sending(Sending),
    Harvesting(Harvesting),
    OpeningFetch(OpeningFetch),
    Pausing(Pausing),
    LastHarvest(LastHarvest),
    LastRound(LastRound),
    AwaitReady(AwaitReady),
    Verifying(Verifying),
    HandingOver(HandingOver),
    Asking(Asking),
    Serving(Serving),
    Done,
}

/// The guest is announced, and the dirty log is being started. Both sides may finish first.
#[derive(Debug, Default)]
pub(super) struct Announced {
    /// The session's token, once the destination has accepted the guest.
    pub(super) accepted: Option<Token>,
    /// The pages of the first round, once the log is running.
    pub(super) first_round: Option<Found>,
}

/// The data channels are being opened.
#[derive(Debug)]
pub(super) struct Joining {
    pub(super) first_round: Found,
}

/// A round is being sent, or the next one is not due yet.
#[derive(Debug, Default)]
pub(super) struct Sending {
    /// FINAL was withdrawn, and it is not known yet that the destination has processed WITHDRAW.
    /// No round begins before that.
    pub(super) withdrawal: Option<Withdrawal>,
}

/// What shows that the destination has processed WITHDRAW.
#[derive(Clone, Copy, Debug)]
pub(super) enum Withdrawal {
    /// The control channel was lost, so WITHDRAW was not sent. The destination withdraws FINAL
    /// itself when it accepts another control channel.
    Unsent,
    /// The answer to this ping, which was sent after WITHDRAW, or to a later one.
    SentBefore(u64),
}

/// The log is being harvested with the guest running.
#[derive(Debug)]
pub(super) struct Harvesting;

/// The fetch lanes are being opened, and the destination frees outdated pages. The guest still
/// runs.
#[derive(Debug, Default)]
pub(super) struct OpeningFetch {
    /// All harvests together.
    pub(super) found: Found,
    /// Pages that the last LACKING named for the first time.
    pub(super) named: u64,
    /// When it was sent.
    pub(super) named_at: Duration,
    /// How often pages were named.
    pub(super) namings: u32,
    /// How long the destination took to free them.
    pub(super) freed_in: Duration,
    /// Whether all fetch lanes have channels.
    pub(super) are_open: bool,
    /// The ping after LACKING, until it is answered: the destination has freed outdated pages then.
    pub(super) ping: Option<u64>,
    /// The log is being harvested again.
    pub(super) is_harvesting: bool,
    /// The destination has withdrawn LACKING since that harvest began.
    pub(super) is_withdrawn: bool,
}

/// The guest is being paused.
#[derive(Debug)]
pub(super) struct Pausing;

/// The log is being harvested with the guest paused.
#[derive(Debug)]
pub(super) struct LastHarvest {
    pub(super) pause: Pause,
}

/// The last round is being sent, and the state is being saved. With post-copy there is no last
/// round.
#[derive(Debug)]
pub(super) struct LastRound {
    pub(super) pause: Pause,
    /// When the last harvest was done.
    pub(super) since: Duration,
    /// The VMM's state, once it is saved.
    pub(super) state: Option<GuestBytes>,
    /// What was read from the guest's storage with it.
    pub(super) storage_sample: Vec<u8>,
    /// The digest of everything that was sent, once all lanes have sent everything.
    pub(super) digest: Option<u64>,
}

/// FINAL was sent.
#[derive(Debug)]
pub(super) struct AwaitReady {
    pub(super) pause: Pause,
    /// The digest in FINAL.
    pub(super) digest: u64,
    /// When FINAL was sent.
    pub(super) sent_at: Duration,
    /// Both hashes, if they were requested before FINAL.
    pub(super) comparison: Option<Comparison>,
}

/// The destination is ready, and the hashes of both memories are not complete.
#[derive(Debug)]
pub(super) struct Verifying {
    pub(super) pause: Pause,
    pub(super) comparison: Comparison,
    /// Since when the guest has been waiting only for the comparison.
    pub(super) since: Duration,
}

/// READY was accepted. The guest may be promised to the destination.
#[derive(Debug)]
pub(super) struct HandingOver {
    pub(super) pause: Pause,
    /// When READY was accepted.
    pub(super) since: Duration,
}

/// COMMIT is journaled, and the destination does not answer.
#[derive(Debug)]
pub(super) struct Asking {
    /// The pause of the guest. A process that was restarted does not know it.
    pub(super) pause: Option<Pause>,
    /// When READY was accepted, or when this process was started after it.
    pub(super) since: Duration,
}

/// The destination runs the guest and fetches pages of its memory from here.
#[derive(Debug)]
pub(super) struct Serving {
    /// When the destination first said so.
    pub(super) since: Duration,
    /// Whether the present channel carries the destination's messages. If not, it is being asked.
    pub(super) is_heard: bool,
}

/// Pages that a harvest found.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Found {
    /// Their number.
    pub(super) pages: u64,
    /// Duration of the harvest.
    pub(super) took: Duration,
    /// For how long the guest was paused for it.
    pub(super) stood_still: Duration,
}

/// The guest's pause for the handover.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pause {
    pub(super) since: Duration,
}

/// The hashes of both paused memories, for one FINAL.
#[derive(Clone, Copy, Debug)]
pub(super) struct Comparison {
    /// Identifies this side's hash.
    pub(super) attempt: u32,
    pub(super) ours: Option<WholeHash>,
    pub(super) theirs: Option<WholeHash>,
}

impl Phase {
    /// The phase in words.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Announced(_) | Self::Joining(_) => "the negotiation",
            Self::Sending(_) | Self::Harvesting(_) | Self::OpeningFetch(_) => "pre-copy",
            Self::Pausing(_) | Self::LastHarvest(_) => "the pause",
            Self::LastRound(_) => "the last round",
            Self::AwaitReady(_) => "the wait for READY",
            Self::Verifying(_) => "the comparison of both memories",
            Self::HandingOver(_) | Self::Asking(_) => "the handover",
            Self::Serving(_) => "post-copy",
            Self::Done => "the end",
        }
    }

    pub(super) fn is_done(&self) -> bool {
        matches!(self, Self::Done)
    }

    /// The guest's pause for the handover, if it is paused.
    pub(super) fn pause(&self) -> Option<Pause> {
        match self {
            Self::LastHarvest(LastHarvest { pause })
            | Self::LastRound(LastRound { pause, .. })
            | Self::AwaitReady(AwaitReady { pause, .. })
            | Self::Verifying(Verifying { pause, .. })
            | Self::HandingOver(HandingOver { pause, .. }) => Some(*pause),
            Self::Asking(Asking { pause, .. }) => *pause,
            Self::Announced(_)
            | Self::Joining(_)
            | Self::Sending(_)
            | Self::Harvesting(_)
            | Self::OpeningFetch(_)
            | Self::Pausing(_)
            | Self::Serving(_)
            | Self::Done => None,
        }
    }

    /// Whether the destination's hash is outstanding.
    pub(super) fn awaits_verified(&self) -> bool {
        match self {
            Self::AwaitReady(AwaitReady { comparison, .. }) => {
                comparison.is_some_and(|comparison| comparison.theirs.is_none())
            }
            Self::Verifying(Verifying { comparison, .. }) => comparison.theirs.is_none(),
            _ => false,
        }
    }
}
