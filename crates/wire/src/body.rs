//! Bodies of control messages: a tuple whose form never changes, followed since version 2 by
//! fields.

mod known;

use std::fmt;

use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use vmferry_memory::{GuestBytes, SlotId, SlotLayout};

use crate::control::Buffer;
use crate::error::WireError;
use crate::fields::{self, FIELDS_SINCE};
use crate::message::{
    ControlMessage, MAX_CONFIG_BYTES, MAX_FREE_RUNS, MAX_LACKING_BYTES, MAX_LANES, MAX_SLOTS,
    MAX_STORAGE_SAMPLE_BYTES, name_of,
};
use crate::reason::Reason;
use vmferry_handover::{GuestIdentity, MAX_NAME_BYTES, SessionId, SessionKind, SessionWord};

pub(crate) const MAX_VMM_BYTES: usize = 64;

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

#[derive(Deserialize)]
struct Final<'a> {
    #[serde(deserialize_with = "lane_sequences")]
    lane_sequences: Vec<u64>,
    digest: u64,
    #[serde(borrow)]
    state: &'a [u8],
}

/// FINAL without the bytes of its state.
#[derive(Deserialize)]
struct FinalHead {
    #[serde(deserialize_with = "lane_sequences")]
    lane_sequences: Vec<u64>,
    digest: u64,
    state_bytes: u64,
}

#[derive(Deserialize)]
struct Lacking<'a> {
    slot: SlotId,
    first: u64,
    #[serde(borrow)]
    bits: &'a [u8],
}

/// Reads the sequence numbers of the lanes' last frames. A body of FINAL may be 64 MiB long, and a
/// number takes up to eight times its wire size in memory, so reading stops at the first lane
/// beyond the limit.
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
    /// Appends the message's body, without the header.
    pub(crate) fn encode_body(&self, version: u16, into: &mut impl Buffer) {
        self.encode_tuple(into);
        if version >= FIELDS_SINCE {
            self.encode_fields(into);
        }
    }

    fn encode_tuple(&self, into: &mut impl Buffer) {
        match self {
            Self::Begin {
                session,
                guest,
                vmm,
                config,
                layout,
                lanes,
                verify,
                reconnect_ms,
                ..
            } => {
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
            Self::Accept { token, .. } => put(into, token),
            Self::Refuse { reason, .. } | Self::Abort { reason } => put(into, reason),
            Self::Placed { lane, sequence } => put(into, &(lane, sequence)),
            Self::Final { lane_sequences, digest, state, .. } => {
                put(into, &(lane_sequences, digest, serde_bytes::Bytes::new(state)));
            }
            Self::Ready { digest, load_us } => put(into, &(digest, load_us)),
            Self::Verify {} | Self::Withdraw {} => {}
            Self::Verified { hash, pages, elapsed_us } => put(into, &(hash, pages, elapsed_us)),
            Self::Commit { session } | Self::Query { session, .. } => put(into, session),
            Self::Running { session, start_us } => put(into, &(session, start_us)),
            Self::Aborted { session, reason } => put(into, &(session, reason)),
            Self::Ping { nonce } | Self::Pong { nonce } => put(into, nonce),
            Self::Answer { session, word, .. } => {
                // For a release that does not know ENDED, which is a field. The destination needs
                // nothing of such a source.
                let word = match word {
                    SessionWord::Ended => &SessionWord::Owns,
                    word => word,
                };
                put(into, &(session, word));
            }
            Self::Free { slot, runs } => put(into, &(slot, runs)),
            Self::Lacking { slot, first, bits } => {
                put(into, &(slot, first, serde_bytes::Bytes::new(bits)));
            }
        }
    }

    /// Decodes a message from its type number and whole body. Also returns the numbers of the
    /// fields that were ignored.
    pub(crate) fn decode_body(
        number: u16,
        version: u16,
        body: &[u8],
    ) -> Result<(Self, Vec<u16>), WireError> {
        let (message, rest) = Self::decode_tuple(number, body)?;
        message.finish(version, rest)
    }

    /// Like [`decode_body`](Self::decode_body), but keeps the state of FINAL in the body's own
    /// memory.
    pub(crate) fn decode_whole(
        number: u16,
        version: u16,
        mut body: GuestBytes,
    ) -> Result<(Self, Vec<u16>), WireError> {
        if number != crate::number::FINAL {
            return Self::decode_body(number, version, &body);
        }
        let (FinalHead { lane_sequences, digest, state_bytes }, rest) = get(number, &body)?;
        let remaining = rest.len();
        let Some(remaining) =
            usize::try_from(state_bytes).ok().and_then(|n| remaining.checked_sub(n))
        else {
            return Err(WireError::BadBody { message: "FINAL", detail: "it is truncated".into() });
        };
        let state = body.len() - rest.len()..body.len() - remaining;
        let fields = body[state.end..].to_vec();
        body.copy_within(state.clone(), 0);
        body.truncate(state.len());
        let message = Self::pre_copy_final(lane_sequences, digest, body);
        message.finish(version, &fields)
    }

    /// Reads the fields after the tuple, and checks the complete message.
    fn finish(mut self, version: u16, rest: &[u8]) -> Result<(Self, Vec<u16>), WireError> {
        let message = &mut self;
        let mut ignored = Vec::new();
        if version >= FIELDS_SINCE {
            ignored =
                fields::read(message.name(), rest, |field, bytes| message.take(field, bytes))?;
        } else if !rest.is_empty() {
            let detail = format!("{} bytes are left over", rest.len());
            return Err(WireError::BadBody { message: message.name(), detail });
        }
        message.check()?;
        Ok((self, ignored))
    }

    /// Decodes the version 1 part of a message. Also returns the bytes after it.
    fn decode_tuple(number: u16, body: &[u8]) -> Result<(Self, &[u8]), WireError> {
        let (message, rest);
        macro_rules! tuple {
            ($pattern:pat => $message:expr) => {{
                let ($pattern, left) = get(number, body)?;
                (message, rest) = ($message, left);
            }};
        }
        match number {
            1 => tuple!(begin => Begin::into_message(begin)),
            2 => tuple!(token => Self::Accept {
                token,
                release: None,
                algorithms: None,
                verifies_placed: false,
                compares_storage: false,
                post_copy: None,
            }),
            3 => tuple!(reason => Self::Refuse { reason: cleaned(reason), release: None }),
            4 => tuple!((lane, sequence) => Self::Placed { lane, sequence }),
            5 => tuple!(Final { lane_sequences, digest, state } =>
                Self::pre_copy_final(lane_sequences, digest, state.into())),
            6 => tuple!((digest, load_us) => Self::Ready { digest, load_us }),
            7 => tuple!(() => Self::Verify {}),
            8 => tuple!((hash, pages, elapsed_us) => Self::Verified { hash, pages, elapsed_us }),
            9 => tuple!(session => Self::Commit { session }),
            10 => tuple!((session, start_us) => Self::Running { session, start_us }),
            11 => tuple!((session, reason) =>
                Self::Aborted { session, reason: cleaned(reason) }),
            12 => tuple!(reason => Self::Abort { reason: cleaned(reason) }),
            13 => tuple!(nonce => Self::Ping { nonce }),
            14 => tuple!(nonce => Self::Pong { nonce }),
            15 => tuple!(session => Self::Query { session, offer: None }),
            16 => {
                tuple!((session, word) => Self::Answer { session, word, token: None });
                if matches!(message, Self::Answer { word: SessionWord::Ended, .. }) {
                    let detail = "that the guest has crashed is a field, and not a word".into();
                    return Err(WireError::BadBody { message: "ANSWER", detail });
                }
            }
            17 => tuple!(() => Self::Withdraw {}),
            18 => tuple!((slot, runs) => Self::Free { slot, runs }),
            19 => tuple!(Lacking { slot, first, bits } =>
                Self::Lacking { slot, first, bits: bits.to_vec() }),
            other => return Err(WireError::UnknownMessage(other)),
        }
        Ok((message, rest))
    }

    fn check(&self) -> Result<(), WireError> {
        let detail = match self {
            Self::Begin { guest, vmm, config, layout, lanes, fetch_lanes, .. } => {
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
                } else if fetch_lanes.is_some_and(|lanes| !lanes.are_in_range()) {
                    "the number of fetch lanes for faults or in the background is not 1 to 16"
                } else {
                    return Ok(());
                }
            }
            Self::Query { offer: Some(offer), .. } if !offer.is_in_range() => {
                "the number of offered fetch lanes for faults or in the background is not 1 to 16"
            }
            Self::Final { lane_sequences, .. }
                if !(1..=usize::from(MAX_LANES)).contains(&lane_sequences.len()) =>
            {
                "the number of lanes is not 1 to 16"
            }
            Self::Final { storage_sample, .. }
                if storage_sample.len() > MAX_STORAGE_SAMPLE_BYTES =>
            {
                "its sample of the storage is too long"
            }
            Self::Free { runs, .. } if runs.len() > MAX_FREE_RUNS => "it has too many runs",
            Self::Lacking { bits, .. } if bits.len() > MAX_LACKING_BYTES => "it has too many bits",
            _ => return Ok(()),
        };
        Err(WireError::BadBody { message: self.name(), detail: detail.into() })
    }
}

impl Begin {
    fn into_message(self) -> ControlMessage {
        let (uuid, name) = self.guest;
        ControlMessage::Begin {
            session: self.session,
            guest: GuestIdentity { uuid: uuid::Uuid::from_bytes(uuid), name },
            vmm: self.vmm,
            config: self.config,
            layout: self.layout,
            lanes: self.lanes,
            verify: self.verify,
            reconnect_ms: self.reconnect_ms,
            release: None,
            streams: false,
            used_bytes: Vec::new(),
            fetch_lanes: None,
            witness: None,
        }
    }
}

impl ControlMessage {
    /// FINAL without fields.
    fn pre_copy_final(lane_sequences: Vec<u64>, digest: u64, state: GuestBytes) -> Self {
        let kind = SessionKind::PreCopy;
        let storage_sample = Vec::new();
        Self::Final { lane_sequences, digest, state, paused: false, kind, storage_sample }
    }
}

fn cleaned(reason: Reason) -> Reason {
    reason.cleaned()
}

fn put(into: &mut impl Buffer, value: &impl Serialize) {
    postcard::to_io(value, into)
        .expect("writing to memory does not fail, and these types have no unsized sequences");
}

fn get<'de, T: Deserialize<'de>>(
    number: u16,
    body: &'de [u8],
) -> Result<(T, &'de [u8]), WireError> {
    let message = name_of(number).unwrap_or("UNKNOWN");
    let bad = |detail: String| WireError::BadBody { message, detail };
    postcard::take_from_bytes(body).map_err(|error| bad(error.to_string()))
}
