//! Events and actions of the destination's machine.

use std::time::Duration;

use vmferry_memory::{GuestBytes, PageRun, PageSet, WholeHash};
use vmferry_wire::{ControlMessage, FetchLanes, LaneOffer, Release, SessionId};

use crate::data::destination::fetch::handle::FetchProgress;
use crate::error::MigrateError;
use crate::vmm::GuestDescription;
use vmferry_handover::{Register, SessionKind, VmError};

/// A connection with control messages: the session's control channel, or a channel on which a
/// source in doubt asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkId(pub u64);

impl LinkId {
    /// The session's control channel.
    pub const CONTROL: Self = Self(0);
}

/// An event.
#[derive(Debug)]
pub enum Input {
    /// A message on a control channel.
    Control {
        /// The connection that it came from.
        link: LinkId,
        /// The message.
        message: ControlMessage,
    },
    /// Unknown fields of the message that comes next. They were ignored.
    UnknownFields {
        /// The message's name.
        message: &'static str,
        /// Their numbers.
        fields: Vec<u16>,
    },
    /// The control channel was lost.
    LinkLost(MigrateError),
    /// The source has reestablished the control channel. Only valid where
    /// [`may_resume`](super::Destination::may_resume) returns true.
    Resumed,
    /// A data channel was lost.
    LaneLost {
        /// Its lane.
        lane: u8,
        /// Identifies the lane's channel: how often it had been dialed before. The driver only
        /// forwards the loss of the present channel.
        attempt: u64,
        /// The cause.
        error: MigrateError,
    },
    /// A lane has a data channel, for the first time or again.
    LaneJoined {
        /// The lane.
        lane: u8,
    },
    /// The source has reconnected with the announcement of a guest, and abandons this session.
    Superseded,
    /// The VMM has allocated the machine's memory, or refuses.
    Prepared(Result<Prepared, MigrateError>),
    /// OPEN is on disk, or is not.
    Opened(Result<(), MigrateError>),
    /// A lane has placed everything up to the end of a round. Several threads place its frames, so
    /// this may be reported after the end of a later round.
    LaneEnded {
        /// The lane.
        lane: u8,
        /// The sequence number of the round's last frame.
        sequence: u64,
    },
    /// Bytes have arrived on data channels since the last time, possibly not whole frames.
    Arriving,
    /// The VMM of a carried guest has closed the stream of its requests for pages. Handled by the
    /// driver, which asks the VMM why.
    RequestsEnded,
    /// The guest's VMM is a process of its own, and has ended. Handled by the driver, which asks
    /// the VMM how.
    VmmGone,
    /// The guest's VMM is a process of its own, and has ended in this way.
    GuestEnded {
        /// The guest was powered off, or its VMM was told to end.
        in_order: bool,
    },
    /// The VMM has stopped reading a stream. Handled by the driver, which asks the VMM why.
    StreamRefused,
    /// The digest of everything that was placed.
    Digest(u64),
    /// The state is loaded, or could not be.
    Loaded(Result<Loaded, MigrateError>),
    /// This side's whole-memory hash, and how long it took.
    Hashed(WholeHash, Duration),
    /// The session's register at the witness after the claim. With an error it is not known.
    Claimed(Result<Register, VmError>),
    /// RUN-INTENT is on disk. With an error this is unknown.
    IntentWritten(Result<(), MigrateError>),
    /// FETCHED is on disk. With an error this is unknown.
    FetchedWritten(Result<(), MigrateError>),
    /// ENDED is on disk. With an error this is unknown.
    EndedWritten(Result<(), MigrateError>),
    /// ABORTED is on disk. With an error this is unknown.
    AbortWritten(Result<(), MigrateError>),
    /// The guest's vCPUs were started, or could not be.
    Started(Result<(), MigrateError>),
    /// The last page that the guest lacked was placed.
    Fetched,
    /// An action failed.
    Failed(MigrateError),
    /// An action was carried out, in this time, in which no input was processed.
    Away {
        /// Its duration.
        took: Duration,
    },
    /// The user cancels.
    Cancel,
    /// Time has passed.
    Tick,
}

/// What the VMM has prepared for a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// Whether it compares a sample of the guest's storage.
    pub compares_storage: bool,
    /// Whether the guest can run there before all its pages have arrived, and why not.
    pub post_copy: Result<(), String>,
}

/// How long it took to load a guest's state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    /// Duration of loading.
    pub took: Duration,
    /// Duration of comparing the guest's storage before.
    pub compared: Duration,
}

/// An action. The input named after the colon reports its result.
#[derive(Debug)]
pub enum Action {
    /// Send a message on one control channel.
    Send {
        /// The connection to send on.
        link: LinkId,
        /// The message.
        message: ControlMessage,
    },
    /// Send a message on every control channel that is open.
    Broadcast(ControlMessage),
    /// Let the VMM check the guest and allocate its memory: `Prepared`.
    Prepare {
        /// The guest.
        guest: GuestDescription,
        /// Whether the guest is carried; unknown in protocol version 1.
        streams: Option<bool>,
        /// Bytes that the guest uses of each slot, as far as they are known.
        used_bytes: Vec<Option<u64>>,
    },
    /// Create the session's journal and append OPEN: `Opened`.
    Open(SessionId),
    /// Accept this number of data channels and place what they receive: `LaneEnded` after each
    /// round.
    ExpectLanes {
        /// The number of lanes.
        lanes: u8,
        /// The fetch lanes that may be opened too.
        fetch_lanes: Option<FetchLanes>,
    },
    /// Free these pages, which are outdated, and forget their hashes. With an error: `Failed`.
    FreeOutdated {
        /// The pages.
        runs: Vec<PageRun>,
    },
    /// Fetch these pages from now on when they are touched. The data channels are no longer needed.
    /// With an error: `Failed`.
    FetchMissing {
        /// Pages that only the source has.
        missing: PageSet,
    },
    /// Sum up the hashes of all pages as last placed: `Digest`.
    SumDigest,
    /// Load the state: `Loaded`.
    Load {
        /// The state.
        state: GuestBytes,
        /// Whether the guest must stay paused.
        paused: bool,
        /// What the source has read from the guest's storage, to be compared first; empty if there
        /// is nothing to compare.
        storage_sample: Vec<u8>,
    },
    /// Hash the whole memory concurrently: `Hashed`.
    Hash {
        /// Pages to leave out.
        except: PageSet,
    },
    /// Claim the guest at the witness: `Claimed`.
    Claim,
    /// Append RUN-INTENT of a session of this kind: `IntentWritten`.
    WriteIntent(SessionKind),
    /// Append FETCHED: `FetchedWritten`.
    WriteFetched,
    /// Append ENDED: `EndedWritten`.
    WriteEnded,
    /// Append ABORTED: `AbortWritten`.
    WriteAborted {
        /// Why, for people.
        reason: String,
    },
    /// Run the guest: `Started`.
    Run,
    /// Fetch all missing pages, whether or not they are touched: `Fetched`.
    FetchAll,
    /// Close all fetch lanes and expect the offered ones, with a new token. Answer the question
    /// with FETCHING and this token.
    UseOffer {
        /// The connection with the question.
        link: LinkId,
        /// The lanes.
        offer: LaneOffer,
    },
    /// Discard the guest's memory and state.
    Discard,
    /// Notify the observer.
    Report(Report),
}

/// A notification for the observer.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Report {
    /// A guest was announced and accepted.
    Accepted {
        /// The session ID, which is the same at the source.
        run: SessionId,
        /// The guest's name.
        name: String,
        /// The guest's memory in bytes.
        memory_bytes: u64,
        /// Number of data channels.
        lanes: u8,
        /// The protocol version.
        protocol: u16,
        /// The source's release, if it has announced it.
        source: Option<Release>,
    },
    /// The source sent fields of a newer release that may be ignored. Reported once for each type
    /// of message.
    UnknownFields {
        /// The message's name.
        message: &'static str,
        /// The field numbers.
        fields: Vec<u16>,
    },
    /// A channel was lost, and the source may reestablish it.
    LinkLost {
        /// `control` or `lane N`.
        channel: String,
        /// The cause, in words.
        reason: String,
    },
    /// The channel was reestablished.
    LinkRestored {
        /// `control` or `lane N`.
        channel: String,
        /// For how long it was missing, in milliseconds.
        after_ms: f64,
    },
    /// Everything has arrived; waiting for COMMIT.
    Ready,
    /// The link was lost after READY: waiting for the source to reconnect until the commit timeout.
    WaitingForWord,
    /// The guest runs here.
    Running,
    /// The guest runs here, and this number of pages are still at the source.
    Fetching {
        /// The missing pages.
        pages: u64,
    },
    /// Pages were fetched while the guest ran. Reported every second by the driver.
    FetchProgress(Box<FetchProgress>),
    /// The last missing page has arrived.
    Fetched,
    /// The guest has ended while it lacked pages, and needs none any more.
    GuestEnded {
        /// It was powered off, or its VMM was told to end. Otherwise it has crashed, and the source
        /// keeps what it lacked.
        in_order: bool,
    },
    /// Something failed while the guest runs here and lacks pages.
    FetchingFailed {
        /// The cause, in words.
        reason: String,
    },
    /// The guest is here, paused as it was at the source.
    Paused,
}

/// How the session ended.
#[derive(Debug)]
pub enum Ending {
    /// The guest runs here. An error means that the guest crashed; this host still owns it.
    Owns(Option<MigrateError>),
    /// The guest never ran here, and the journal says so.
    Aborted(MigrateError),
    /// Nothing was promised: the announced guest was refused before the journal was created.
    Refused(MigrateError),
    /// The journal failed. This process does not run the guest; after a restart it is determined
    /// who has it.
    Stuck(MigrateError),
}
