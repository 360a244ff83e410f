//! What goes into the destination's machine, and what comes out.

use std::time::Duration;

use vmferry_memory::{GuestBytes, PageSet, WholeHash};
use vmferry_wire::{ControlMessage, Release, SessionId};

use crate::error::MigrateError;
use crate::vm::GuestDescription;

/// A connection that carries control messages: the session's control channel, or a channel on
/// which a source in doubt asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkId(pub u64);

impl LinkId {
    /// The session's control channel.
    pub const CONTROL: Self = Self(0);
}

/// What happened.
#[derive(Debug)]
pub enum Input {
    /// A message on a control channel.
    Control {
        /// Where it came from.
        link: LinkId,
        /// The message.
        message: ControlMessage,
    },
    /// Fields that came with the message that comes next, and were left out.
    UnknownFields {
        /// The message's name.
        message: &'static str,
        /// Their numbers.
        fields: Vec<u16>,
    },
    /// The control channel is gone.
    LinkLost(MigrateError),
    /// The source has made the control channel again. Only where
    /// [`may_resume`](super::machine::Destination::may_resume) says so.
    Resumed,
    /// A data channel is gone.
    LaneLost {
        /// Its lane.
        lane: u8,
        /// Which of the lane's channels it was: how often it had been dialled before. The driver passes on
        /// the loss of the present one only.
        attempt: u64,
        /// Why.
        error: MigrateError,
    },
    /// A lane has a data channel, perhaps again.
    LaneJoined {
        /// The lane.
        lane: u8,
    },
    /// The source is here again with the announcement of a guest, and no longer wants this session.
    Superseded,
    /// The VMM has made the machine's memory, or refuses.
    Prepared(Result<(), MigrateError>),
    /// OPEN is on disk, or is not.
    Opened(Result<(), MigrateError>),
    /// A lane has placed everything up to the end of a round. Several threads place its frames, so that this may be told
    /// after the end of a later round.
    LaneEnded {
        /// The lane.
        lane: u8,
        /// The sequence number of the round's last frame.
        sequence: u64,
    },
    /// Bytes have come on data channels since the last time, if not whole frames.
    Arriving,
    /// The VMM takes no more of a stream: for the driver, which asks it why.
    StreamRefused {
        /// What the socket says.
        source: std::io::Error,
    },
    /// The digest of everything that was placed.
    Digest(u64),
    /// The state is loaded, or can't be.
    Loaded(Result<Duration, MigrateError>),
    /// This side's whole-memory hash, and how long it took.
    Hashed(WholeHash, Duration),
    /// RUN-INTENT is on disk, or nobody knows.
    IntentWritten(Result<(), MigrateError>),
    /// ABORTED is on disk, or nobody knows.
    AbortWritten(Result<(), MigrateError>),
    /// The guest's vCPUs were started, or could not be.
    Started(Result<(), MigrateError>),
    /// An action failed.
    Failed(MigrateError),
    /// The user wants to end it.
    Cancel,
    /// Time has passed.
    Tick,
}

impl Input {
    /// Whether it is the result of an action that the session's thread carries out itself.
    pub(super) fn answers_action(&self) -> bool {
        matches!(
            self,
            Self::Prepared(_)
                | Self::Opened(_)
                | Self::Digest(_)
                | Self::Loaded(_)
                | Self::IntentWritten(_)
                | Self::AbortWritten(_)
                | Self::Started(_)
        )
    }
}

/// What to do. Each action that yields a result is answered by the input named.
#[derive(Debug)]
pub enum Action {
    /// Send a message on one control channel.
    Send {
        /// Where to.
        link: LinkId,
        /// The message.
        message: ControlMessage,
    },
    /// Send a message on every control channel that is open.
    Broadcast(ControlMessage),
    /// Let the VMM check the guest and make its memory: `Prepared`.
    Prepare {
        /// The guest.
        guest: GuestDescription,
        /// Whether its VMM streams it; unsaid in version 1 of the protocol.
        streams: Option<bool>,
        /// Bytes that it uses of each slot, as far as they are known.
        used_bytes: Vec<Option<u64>>,
    },
    /// Make the session's journal and append OPEN: `Opened`.
    Open(SessionId),
    /// Accept so many data channels and place what they bring: `LaneEnded` each round.
    ExpectLanes {
        /// How many.
        lanes: u8,
    },
    /// Sum up the hashes of all pages as last placed: `Digest`.
    SumDigest,
    /// Load the state: `Loaded`.
    Load {
        /// The state.
        state: GuestBytes,
        /// Whether the guest is to stay paused.
        paused: bool,
    },
    /// Hash the memory whole, beside everything else: `Hashed`.
    Hash {
        /// Without these pages.
        except: PageSet,
    },
    /// Append RUN-INTENT: `IntentWritten`.
    WriteIntent,
    /// Append ABORTED: `AbortWritten`.
    WriteAborted {
        /// Why, for people.
        reason: String,
    },
    /// Run the guest: `Started`.
    Run,
    /// Throw the guest's memory and state away.
    Discard,
    /// Tell whoever watches.
    Report(Report),
}

/// What whoever watches is told.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Report {
    /// A guest was announced and accepted.
    Accepted {
        /// The migration's session, which the source has as well.
        run: SessionId,
        /// Its name.
        name: String,
        /// Its memory in bytes.
        memory_bytes: u64,
        /// Data channels.
        lanes: u8,
        /// The version of the protocol.
        protocol: u16,
        /// What the source is, if it has said so.
        source: Option<Release>,
    },
    /// The source says what only a newer release knows, and need not be known. Once for each kind of message.
    UnknownFields {
        /// The message's name.
        message: &'static str,
        /// Numbers of its fields.
        fields: Vec<u16>,
    },
    /// A channel is gone, and the source may make it again.
    LinkLost {
        /// `control` or `lane N`.
        channel: String,
        /// Why, in words.
        reason: String,
    },
    /// It was made again.
    LinkRestored {
        /// `control` or `lane N`.
        channel: String,
        /// For how long it was gone, in milliseconds.
        after_ms: f64,
    },
    /// Everything is here; waiting for COMMIT.
    Ready,
    /// The link was lost while READY: waiting for the source's word until the commit time-out.
    WaitingForWord,
    /// The guest runs here.
    Running,
    /// The guest is here, and paused as it was at the source.
    Paused,
}

/// How it ended.
#[derive(Debug)]
pub enum Ending {
    /// The guest runs here. An error is a crash of the guest, which is this host's all the same.
    Owns(Option<MigrateError>),
    /// The guest never ran here, and the journal says so.
    Aborted(MigrateError),
    /// Nothing was promised: the announced guest was refused before the journal was made.
    Refused(MigrateError),
    /// The journal failed: this process does not run the guest, and a restart tells who has it.
    Stuck(MigrateError),
}
