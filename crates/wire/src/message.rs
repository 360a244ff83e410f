//! The messages of the control channel.

use vmferry_memory::{GuestBytes, SlotId, SlotLayout};

use crate::algorithm::AlgorithmSet;
use crate::number;
use crate::reason::Reason;
use crate::session::Token;
use vmferry_api::Release;
use vmferry_handover::{GuestIdentity, SessionId, SessionKind, SessionWord, WitnessId};

/// Maximum length of the VMM-defined configuration, in bytes.
pub const MAX_CONFIG_BYTES: usize = 16 << 10;
/// Maximum number of memory slots of a guest.
pub const MAX_SLOTS: usize = 4096;
/// Maximum number of data channels.
pub const MAX_LANES: u8 = 16;
/// Maximum number of runs in a FREE. With any values, they fit the limit of a message.
pub const MAX_FREE_RUNS: usize = 3000;
/// Maximum number of bytes in a LACKING: one bit for each page of 1 GiB.
pub const MAX_LACKING_BYTES: usize = 32 << 10;
/// Maximum size of the sample of the guest's storage in FINAL: 256 hashes take 8 KiB.
pub const MAX_STORAGE_SAMPLE_BYTES: usize = 64 << 10;

/// A control message. S: sent by the source, D: sent by the destination. Members marked "since
/// version 2" are fields; version 1 does not send them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlMessage {
    /// S: announces the guest.
    Begin {
        /// The migration.
        session: SessionId,
        /// The guest's identity.
        guest: GuestIdentity,
        /// The VMM and machine type.
        vmm: String,
        /// The machine's configuration in the VMM's own format.
        config: Vec<u8>,
        /// The layout of the memory slots.
        layout: Vec<SlotLayout>,
        /// Number of data channels.
        lanes: u8,
        /// Whether both sides will hash their whole memory before COMMIT.
        verify: bool,
        /// How long the source tries to reestablish a lost link, in milliseconds.
        reconnect_ms: u32,
        /// Since version 2: the source's release.
        release: Option<Release>,
        /// Since version 2: whether the VMM streams the guest, one stream per lane. A destination
        /// that does not support streams must refuse. In version 1, only `vmm` implies it.
        streams: bool,
        /// Since version 2: bytes that the guest uses in each slot, where known. Empty if not sent.
        used_bytes: Vec<Option<u64>>,
        /// Since version 2: the fetch lanes that the source opens if it switches over with
        /// post-copy. `None` if it never does.
        fetch_lanes: Option<FetchLanes>,
        /// Since version 2: who decides the handover in doubt. A destination that does not ask the
        /// same witness before it runs the guest must refuse.
        witness: Option<WitnessId>,
    },
    /// D: accepts the guest. Data channels must present the token.
    Accept {
        /// The session's token.
        token: Token,
        /// Since version 2: the destination's release.
        release: Option<Release>,
        /// Since version 2: the algorithms that the destination can decode;
        /// [`AlgorithmSet::VERSION_1`] if not sent.
        algorithms: Option<AlgorithmSet>,
        /// Since version 2: whether the destination accepts VERIFY before FINAL. It then hashes its
        /// memory as placed, before it loads the state.
        verifies_placed: bool,
        /// Since version 2: whether FINAL should have a sample of the guest's storage, because the
        /// destination does not know whether its storage is the same.
        compares_storage: bool,
        /// Since version 2: whether the destination can run the guest before all its pages have
        /// arrived, and why not, in one [line](crate::one_line). `None` if it was not asked, or is
        /// of a release without post-copy.
        post_copy: Option<Result<(), String>>,
    },
    /// D: refuses the guest.
    Refuse {
        /// Why.
        reason: Reason,
        /// Since version 2: the destination's release.
        release: Option<Release>,
    },
    /// D: every frame up to and including `sequence` on `lane` is in guest memory.
    Placed {
        /// The lane.
        lane: u8,
        /// The frame's number on its lane.
        sequence: u64,
    },
    /// S: everything is sent; the guest is paused. With post-copy everything is sent except the
    /// pages that LACKING has named.
    Final {
        /// The number of the last frame of each lane.
        lane_sequences: Vec<u64>,
        /// Sum of the hashes of all pages as last sent.
        digest: u64,
        /// The device state.
        state: GuestBytes,
        /// Since version 2: whether another party paused the guest, which must then stay paused. A
        /// destination that does not support this must refuse.
        paused: bool,
        /// Since version 2: whether the guest is to run before all its pages have arrived. A
        /// destination that has not announced that it can do that must refuse.
        kind: SessionKind,
        /// Since version 2: what the source has read from the guest's storage, in the VMM's own
        /// format, for a destination that sent `compares_storage`. Empty if there is none. At most
        /// [`MAX_STORAGE_SAMPLE_BYTES`].
        storage_sample: Vec<u8>,
    },
    /// D: all pages are placed and the state is loaded; the destination waits for COMMIT.
    Ready {
        /// Sum of the hashes of all pages as last placed.
        digest: u64,
        /// Time that loading the state took, in microseconds.
        load_us: u64,
    },
    /// S: asks for a hash of the destination's whole memory. Sent before FINAL to a destination
    /// that sent `verifies_placed`, which hashes when all pages are placed and before it loads the
    /// state. Sent after READY to any other destination, which hashes at once.
    Verify {},
    /// D: the hash of the whole memory.
    Verified {
        /// As `vmferry_memory::WholeHash::hash`.
        hash: u64,
        /// As `vmferry_memory::WholeHash::pages`.
        pages: u64,
        /// Time that hashing took, in microseconds.
        elapsed_us: u64,
    },
    /// S: gives the guest to the destination. The source does not run it from now on.
    Commit {
        /// The migration.
        session: SessionId,
    },
    /// D: the guest runs at the destination.
    Running {
        /// The migration.
        session: SessionId,
        /// From COMMIT to the start of the vCPUs, in microseconds.
        start_us: u64,
    },
    /// D: the destination's journal says that it will never run the guest.
    Aborted {
        /// The migration.
        session: SessionId,
        /// Why.
        reason: Reason,
    },
    /// S: ends the migration. Sent only before COMMIT.
    Abort {
        /// Why.
        reason: Reason,
    },
    /// S or D: asks for a PONG.
    Ping {
        /// Returned in the answer.
        nonce: u64,
    },
    /// The answer to PING.
    Pong {
        /// The nonce of the PING.
        nonce: u64,
    },
    /// S: asks for the destination's word about this session.
    Query {
        /// The migration.
        session: SessionId,
        /// The lanes on which this source can answer requests for missing pages, in a session with
        /// post-copy.
        offer: Option<LaneOffer>,
    },
    /// D: the answer to QUERY.
    Answer {
        /// The migration.
        session: SessionId,
        /// The destination's word, which is binding.
        word: SessionWord,
        /// What the channels of the lanes in the QUERY's offer must present. Those of earlier lanes
        /// are closed.
        token: Option<LaneToken>,
    },
    /// S: takes FINAL back; the guest continues at the source. Valid only before READY.
    Withdraw {},
    /// S: excludes these pages from the hash that VERIFY asks for. The guest has hinted that their
    /// content is not needed, so they may differ.
    Free {
        /// The slot of the pages.
        slot: SlotId,
        /// First page and number of pages of each run, ascending, at most [`MAX_FREE_RUNS`] runs.
        runs: Vec<(u64, u64)>,
    },
    /// S: names pages of which the destination has no version, or an outdated one, when its guest
    /// starts with post-copy. Sent before FINAL, any number of times. WITHDRAW takes it back.
    Lacking {
        /// The slot of the pages.
        slot: SlotId,
        /// The page of the first bit.
        first: u64,
        /// One bit for each page, the lowest of each byte first, at most [`MAX_LACKING_BYTES`].
        bits: Vec<u8>,
    },
}

/// The lanes on which a destination requests missing pages while its guest runs. They are numbered
/// after the data lanes, those for faults first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchLanes {
    /// Lanes for pages that a vCPU waits for, 1 to 16.
    pub faults: u8,
    /// Lanes for all other pages, 1 to 16.
    pub background: u8,
}

/// Fetch lanes that a source offers in QUERY: the source or the destination may have been restarted
/// since BEGIN announced others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneOffer {
    /// The number of the first lane.
    pub first: u8,
    /// The lanes.
    pub lanes: FetchLanes,
    /// The streams that the VMM of a carried guest has at the source. `None` if this release of the
    /// source, or its guest, has none that could begin again.
    pub streams: Option<LateStreamsId>,
}

/// Identifies the streams between the VMMs of a carried guest after the switchover with post-copy.
/// If they are begun again, because a process that carried them has died, they have another number,
/// and the tunnels begin at 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LateStreamsId(pub u64);

impl LateStreamsId {
    /// Those that begin with FINAL.
    pub const FIRST: Self = Self(0);
    /// A process that was restarted has connected none.
    pub const NONE: Self = Self(u64::MAX);
}

/// The destination's answer to a [`LaneOffer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneToken {
    /// What the channels of the lanes present.
    pub token: Token,
    /// The streams that the VMM of a carried guest has at the destination. If the source has
    /// others, it begins them again.
    pub streams: Option<LateStreamsId>,
}

impl LaneOffer {
    pub(crate) fn is_in_range(self) -> bool {
        self.lanes.are_in_range() && self.first.checked_add(self.lanes.count()).is_some()
    }
}

impl FetchLanes {
    /// All lanes.
    #[must_use]
    pub fn count(self) -> u8 {
        self.faults.saturating_add(self.background)
    }

    pub(crate) fn are_in_range(self) -> bool {
        [self.faults, self.background].iter().all(|lanes| (1..=MAX_LANES).contains(lanes))
    }
}

impl ControlMessage {
    /// The type number on the wire. Numbers are never reused.
    #[must_use]
    pub fn number(&self) -> u16 {
        match self {
            Self::Begin { .. } => number::BEGIN,
            Self::Accept { .. } => number::ACCEPT,
            Self::Refuse { .. } => number::REFUSE,
            Self::Placed { .. } => number::PLACED,
            Self::Final { .. } => number::FINAL,
            Self::Ready { .. } => number::READY,
            Self::Verify {} => number::VERIFY,
            Self::Verified { .. } => number::VERIFIED,
            Self::Commit { .. } => number::COMMIT,
            Self::Running { .. } => number::RUNNING,
            Self::Aborted { .. } => number::ABORTED,
            Self::Abort { .. } => number::ABORT,
            Self::Ping { .. } => number::PING,
            Self::Pong { .. } => number::PONG,
            Self::Query { .. } => number::QUERY,
            Self::Answer { .. } => number::ANSWER,
            Self::Withdraw {} => number::WITHDRAW,
            Self::Free { .. } => number::FREE,
            Self::Lacking { .. } => number::LACKING,
        }
    }

    /// The message's name, as in `docs/protocol.md`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        name_of(self.number()).unwrap_or("UNKNOWN")
    }
}

/// The name of a type number, if the number is assigned.
pub(crate) fn name_of(number: u16) -> Option<&'static str> {
    Some(match number {
        number::BEGIN => "BEGIN",
        number::ACCEPT => "ACCEPT",
        number::REFUSE => "REFUSE",
        number::PLACED => "PLACED",
        number::FINAL => "FINAL",
        number::READY => "READY",
        number::VERIFY => "VERIFY",
        number::VERIFIED => "VERIFIED",
        number::COMMIT => "COMMIT",
        number::RUNNING => "RUNNING",
        number::ABORTED => "ABORTED",
        number::ABORT => "ABORT",
        number::PING => "PING",
        number::PONG => "PONG",
        number::QUERY => "QUERY",
        number::ANSWER => "ANSWER",
        number::WITHDRAW => "WITHDRAW",
        number::FREE => "FREE",
        number::LACKING => "LACKING",
        _ => return None,
    })
}
