//! The messages of the control channel.

use std::fmt;

use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use vmferry_memory::{SlotId, SlotLayout};

use crate::error::WireError;
use crate::reason::Reason;
use crate::session::{GuestIdentity, MAX_NAME_BYTES, SessionId, SessionWord, Token};

/// Longest VMM-defined configuration, in bytes.
pub const MAX_CONFIG_BYTES: usize = 16 << 10;
/// Most memory slots of a guest.
pub const MAX_SLOTS: usize = 4096;
/// Most data channels.
pub const MAX_LANES: u8 = 16;
/// Most runs of a FREE: whatever their numbers are, they fit the limit of a message.
pub const MAX_FREE_RUNS: usize = 3000;
const MAX_VMM_BYTES: usize = 64;

/// A control message. S: the source sends it, D: the destination does.
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
    },
    /// D: takes the guest; data channels show the token.
    Accept {
        /// The session's token.
        token: Token,
    },
    /// D: does not take the guest.
    Refuse {
        /// Why.
        reason: Reason,
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
        state: Vec<u8>,
    },
    /// D: everything is placed, the state is loaded; waits for COMMIT.
    Ready {
        /// Sum of the hashes of all pages as last placed.
        digest: u64,
        /// Time that loading the state took, in microseconds.
        load_us: u64,
    },
    /// S: hash your memory whole, as I do mine.
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

#[derive(Serialize, Deserialize)]
struct Begin {
    session: SessionId,
    guest: (uuid::Bytes, String),
    vmm: String,
    #[serde(with = "serde_bytes")]
    config: Vec<u8>,
    layout: Vec<SlotLayout>,
    lanes: u8,
    verify: bool,
    reconnect_ms: u32,
}

#[derive(Serialize, Deserialize)]
struct Final {
    #[serde(deserialize_with = "lane_sequences")]
    lane_sequences: Vec<u64>,
    digest: u64,
    #[serde(with = "serde_bytes")]
    state: Vec<u8>,
}

/// Reads the numbers of the lanes' last frames. A body of FINAL may be long, and numbers grow to eight times their
/// bytes when they are read: one that is too many ends the reading.
fn lane_sequences<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u64>, D::Error> {
    struct Lanes;
    impl<'de> Visitor<'de> for Lanes {
        type Value = Vec<u64>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "at most {MAX_LANES} lanes")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut lanes: A) -> Result<Vec<u64>, A::Error> {
            let mut sequences = Vec::with_capacity(MAX_LANES.into());
            while let Some(sequence) = lanes.next_element()? {
                if sequences.len() == usize::from(MAX_LANES) {
                    return Err(A::Error::custom("there are more than 16 lanes"));
                }
                sequences.push(sequence);
            }
            Ok(sequences)
        }
    }
    deserializer.deserialize_seq(Lanes)
}

impl ControlMessage {
    /// The type number on the wire. Numbers are never reused.
    #[must_use]
    pub fn number(&self) -> u16 {
        match self {
            Self::Begin { .. } => 1,
            Self::Accept { .. } => 2,
            Self::Refuse { .. } => 3,
            Self::Placed { .. } => 4,
            Self::Final { .. } => 5,
            Self::Ready { .. } => 6,
            Self::Verify {} => 7,
            Self::Verified { .. } => 8,
            Self::Commit { .. } => 9,
            Self::Running { .. } => 10,
            Self::Aborted { .. } => 11,
            Self::Abort { .. } => 12,
            Self::Ping { .. } => 13,
            Self::Pong { .. } => 14,
            Self::Query { .. } => 15,
            Self::Answer { .. } => 16,
            Self::Withdraw {} => 17,
            Self::Free { .. } => 18,
        }
    }

    /// The message's name, as `docs/protocol.md` has it.
    #[must_use]
    pub fn name(&self) -> &'static str {
        name_of(self.number()).unwrap_or("UNKNOWN")
    }

    /// Appends the message's body, without header.
    pub(crate) fn encode_body(&self, into: &mut Vec<u8>) {
        match self {
            Self::Begin { session, guest, vmm, config, layout, lanes, verify, reconnect_ms } => {
                let begin = Begin {
                    session: *session,
                    guest: (*guest.uuid.as_bytes(), guest.name.clone()),
                    vmm: vmm.clone(),
                    config: config.clone(),
                    layout: layout.clone(),
                    lanes: *lanes,
                    verify: *verify,
                    reconnect_ms: *reconnect_ms,
                };
                put(into, &begin);
            }
            Self::Accept { token } => put(into, token),
            Self::Refuse { reason } | Self::Abort { reason } => put(into, reason),
            Self::Placed { lane, sequence } => put(into, &(lane, sequence)),
            Self::Final { lane_sequences, digest, state } => {
                put(into, &(lane_sequences, digest, serde_bytes::Bytes::new(state)));
            }
            Self::Ready { digest, load_us } => put(into, &(digest, load_us)),
            Self::Verify {} | Self::Withdraw {} => {}
            Self::Verified { hash, pages, elapsed_us } => put(into, &(hash, pages, elapsed_us)),
            Self::Commit { session } | Self::Query { session } => put(into, session),
            Self::Running { session, start_us } => put(into, &(session, start_us)),
            Self::Aborted { session, reason } => put(into, &(session, reason)),
            Self::Ping { nonce } | Self::Pong { nonce } => put(into, nonce),
            Self::Answer { session, word } => put(into, &(session, word)),
            Self::Free { slot, runs } => put(into, &(slot, runs)),
        }
    }

    /// A message from its type number and whole body.
    pub(crate) fn decode_body(number: u16, body: &[u8]) -> Result<Self, WireError> {
        let message = match number {
            1 => {
                let begin: Begin = get(number, body)?;
                Self::Begin {
                    session: begin.session,
                    guest: GuestIdentity {
                        uuid: uuid::Uuid::from_bytes(begin.guest.0),
                        name: begin.guest.1,
                    },
                    vmm: begin.vmm,
                    config: begin.config,
                    layout: begin.layout,
                    lanes: begin.lanes,
                    verify: begin.verify,
                    reconnect_ms: begin.reconnect_ms,
                }
            }
            2 => Self::Accept { token: get(number, body)? },
            3 => Self::Refuse { reason: get::<Reason>(number, body)?.cleaned() },
            4 => {
                let (lane, sequence) = get(number, body)?;
                Self::Placed { lane, sequence }
            }
            5 => {
                let Final { lane_sequences, digest, state } = get(number, body)?;
                Self::Final { lane_sequences, digest, state }
            }
            6 => {
                let (digest, load_us) = get(number, body)?;
                Self::Ready { digest, load_us }
            }
            7 => {
                get::<()>(number, body)?;
                Self::Verify {}
            }
            8 => {
                let (hash, pages, elapsed_us) = get(number, body)?;
                Self::Verified { hash, pages, elapsed_us }
            }
            9 => Self::Commit { session: get(number, body)? },
            10 => {
                let (session, start_us) = get(number, body)?;
                Self::Running { session, start_us }
            }
            11 => {
                let (session, reason): (_, Reason) = get(number, body)?;
                Self::Aborted { session, reason: reason.cleaned() }
            }
            12 => Self::Abort { reason: get::<Reason>(number, body)?.cleaned() },
            13 => Self::Ping { nonce: get(number, body)? },
            14 => Self::Pong { nonce: get(number, body)? },
            15 => Self::Query { session: get(number, body)? },
            16 => {
                let (session, word) = get(number, body)?;
                Self::Answer { session, word }
            }
            17 => {
                get::<()>(number, body)?;
                Self::Withdraw {}
            }
            18 => {
                let (slot, runs) = get(number, body)?;
                Self::Free { slot, runs }
            }
            other => return Err(WireError::UnknownMessage(other)),
        };
        message.check()?;
        Ok(message)
    }

    fn check(&self) -> Result<(), WireError> {
        let detail = match self {
            Self::Begin { guest, vmm, config, layout, lanes, .. } => {
                if guest.name.len() > MAX_NAME_BYTES || guest.name.chars().any(char::is_control) {
                    "the guest's name is too long or not printable"
                } else if vmm.len() > MAX_VMM_BYTES || vmm.chars().any(char::is_control) {
                    "the VMM's name is too long or not printable"
                } else if config.len() > MAX_CONFIG_BYTES {
                    "the configuration is too long"
                } else if layout.is_empty() || layout.len() > MAX_SLOTS {
                    "there are no memory slots, or too many"
                } else if !(1..=MAX_LANES).contains(lanes) {
                    "the number of data channels is not 1 to 16"
                } else {
                    return Ok(());
                }
            }
            Self::Final { lane_sequences, .. }
                if !(1..=usize::from(MAX_LANES)).contains(&lane_sequences.len()) =>
            {
                "the number of lanes is not 1 to 16"
            }
            Self::Free { runs, .. } if runs.len() > MAX_FREE_RUNS => "it has too many runs",
            _ => return Ok(()),
        };
        Err(WireError::BadBody { message: self.name(), detail: detail.into() })
    }
}

/// The name of a type number, if it has one.
pub(crate) fn name_of(number: u16) -> Option<&'static str> {
    Some(match number {
        1 => "BEGIN",
        2 => "ACCEPT",
        3 => "REFUSE",
        4 => "PLACED",
        5 => "FINAL",
        6 => "READY",
        7 => "VERIFY",
        8 => "VERIFIED",
        9 => "COMMIT",
        10 => "RUNNING",
        11 => "ABORTED",
        12 => "ABORT",
        13 => "PING",
        14 => "PONG",
        15 => "QUERY",
        16 => "ANSWER",
        17 => "WITHDRAW",
        18 => "FREE",
        _ => return None,
    })
}

fn put(into: &mut Vec<u8>, value: &impl Serialize) {
    let bytes = std::mem::take(into);
    *into = postcard::to_extend(value, bytes)
        .expect("writing to memory does not fail, and these types have no unsized sequences");
}

fn get<'de, T: Deserialize<'de>>(number: u16, body: &'de [u8]) -> Result<T, WireError> {
    let message = name_of(number).unwrap_or("UNKNOWN");
    let bad = |detail: String| WireError::BadBody { message, detail };
    let (value, rest) = postcard::take_from_bytes(body).map_err(|error| bad(error.to_string()))?;
    if rest.is_empty() {
        Ok(value)
    } else {
        Err(bad(format!("{} bytes are left over", rest.len())))
    }
}
