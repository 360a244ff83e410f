//! The messages of the control channel.

use vmferry_memory::{GuestBytes, SlotId, SlotLayout};

use crate::algorithm::AlgorithmSet;
use crate::number;
use crate::reason::Reason;
use crate::session::Token;
use vmferry_api::Release;
use vmferry_handover::{GuestIdentity, SessionId, SessionWord};

/// Longest VMM-defined configuration, in bytes.
pub const MAX_CONFIG_BYTES: usize = 16 << 10;
/// Most memory slots of a guest.
pub const MAX_SLOTS: usize = 4096;
/// Most data channels.
pub const MAX_LANES: u8 = 16;
/// Most runs of a FREE: whatever their numbers are, they fit the limit of a message.
pub const MAX_FREE_RUNS: usize = 3000;

/// A control message. S: the source sends it, D: the destination does. What is marked "since version 2" is a field: in
/// version 1 it is not sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlMessage {
    /// S: announces the guest.
    Begin {
        /// The migration.
        session: SessionId,
        /// Who the guest is.
        guest: GuestIdentity,
        /// The VMM and machine type.
        vmm: String,
        /// The machine's configuration in the VMM's own format.
        config: Vec<u8>,
        /// The memory slots.
        layout: Vec<SlotLayout>,
        /// Data channels to come.
        lanes: u8,
        /// Whether both memories will be hashed whole before COMMIT.
        verify: bool,
        /// For how long the source tries to make a lost link again, in milliseconds.
        reconnect_ms: u32,
        /// Since version 2: what the source is.
        release: Option<Release>,
        /// Since version 2: whether the VMM streams the guest, one stream on each lane. A destination that does not know
        /// of streams must refuse. In version 1 only `vmm` says it.
        streams: bool,
        /// Since version 2: bytes that the guest uses of each slot, as far as they are known. Empty
        /// if it is not said.
        used_bytes: Vec<Option<u64>>,
    },
    /// D: takes the guest; data channels show the token.
    Accept {
        /// The session's token.
        token: Token,
        /// Since version 2: what the destination is.
        release: Option<Release>,
        /// Since version 2: what the destination can decode. Unsaid, it is [`AlgorithmSet::VERSION_1`].
        algorithms: Option<AlgorithmSet>,
        /// Since version 2: whether the destination takes VERIFY before FINAL, and then hashes its
        /// memory as it was placed, before it loads the state.
        verifies_placed: bool,
    },
    /// D: does not take the guest.
    Refuse {
        /// Why.
        reason: Reason,
        /// Since version 2: what the destination is.
        release: Option<Release>,
    },
    /// D: every frame up to and including `sequence` on `lane` is in guest memory.
    Placed {
        /// The lane.
        lane: u8,
        /// The frame's number on its lane.
        sequence: u64,
    },
    /// S: everything is sent; the guest is paused.
    Final {
        /// The number of the last frame of each lane.
        lane_sequences: Vec<u64>,
        /// Sum of the hashes of all pages as last sent.
        digest: u64,
        /// The device state.
        state: GuestBytes,
        /// Since version 2: whether somebody has paused the guest, which is to stay so. A
        /// destination that does not know of that must refuse.
        paused: bool,
    },
    /// D: everything is placed, the state is loaded; waits for COMMIT.
    Ready {
        /// Sum of the hashes of all pages as last placed.
        digest: u64,
        /// Time that loading the state took, in microseconds.
        load_us: u64,
    },
    /// S: hash your memory whole, as I do mine. Before FINAL, to a destination that has said
    /// `verifies_placed`: once all of it is placed, and before the state is loaded. After READY, to
    /// any other: at once.
    Verify {},
    /// D: the hash of the whole memory.
    Verified {
        /// As `vmferry_memory::WholeHash::hash`.
        hash: u64,
        /// As `vmferry_memory::WholeHash::pages`.
        pages: u64,
        /// How long it took, in microseconds.
        elapsed_us: u64,
    },
    /// S: the guest is yours. From here on the source does not run it.
    Commit {
        /// The migration.
        session: SessionId,
    },
    /// D: the guest runs here.
    Running {
        /// The migration.
        session: SessionId,
        /// From COMMIT to the start of the vCPUs, in microseconds.
        start_us: u64,
    },
    /// D: has journalled that it will never run the guest.
    Aborted {
        /// The migration.
        session: SessionId,
        /// Why.
        reason: Reason,
    },
    /// S: ends the migration, before COMMIT only.
    Abort {
        /// Why.
        reason: Reason,
    },
    /// S or D: are you there?
    Ping {
        /// Comes back in the answer.
        nonce: u64,
    },
    /// The answer to a ping.
    Pong {
        /// The ping's.
        nonce: u64,
    },
    /// S: what is your word about this session?
    Query {
        /// The migration.
        session: SessionId,
    },
    /// D: this.
    Answer {
        /// The migration.
        session: SessionId,
        /// What the destination knows and is held to.
        word: SessionWord,
    },
    /// S: FINAL does not hold, the guest runs on here. Only before READY is said.
    Withdraw {},
    /// S: leave these pages out of the hash that I am about to ask for. The guest has hinted
    /// that it does not need what they hold, so they need not be equal.
    Free {
        /// The slot that they are in.
        slot: SlotId,
        /// First page and number of pages, ascending, at most [`MAX_FREE_RUNS`] of them.
        runs: Vec<(u64, u64)>,
    },
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
        }
    }

    /// The message's name, as `docs/protocol.md` has it.
    #[must_use]
    pub fn name(&self) -> &'static str {
        name_of(self.number()).unwrap_or("UNKNOWN")
    }
}

/// The name of a type number, if it has one.
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
        _ => return None,
    })
}
