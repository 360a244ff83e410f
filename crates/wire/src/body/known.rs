//! The fields of control messages: their numbers, and how they are written and read.

use vmferry_api::Release;
use vmferry_handover::{SessionKind, SessionWord, WitnessId};

use crate::algorithm::AlgorithmSet;
use crate::control::Buffer;
use crate::fields::{Need, put_mandatory, put_optional};
use crate::message::{ControlMessage, FetchLanes, LaneOffer, LaneToken, LateStreamsId};
use crate::reason::checked_line;
use crate::release::checked_name;
use crate::session::Token;

/// Field numbers are never reused. The same number may mean different things in different messages.
///
/// BEGIN, ACCEPT and REFUSE: the release of vmferry, as text.
const RELEASE: u16 = 1;
/// BEGIN, ACCEPT and REFUSE: the VMM and its release, as text.
const VMM_RELEASE: u16 = 2;
/// BEGIN, mandatory, without content: the VMM streams the guest, one stream on each lane.
const STREAMS: u16 = 3;
/// BEGIN: bytes that the guest uses in each slot, a u64 per slot; [`UNKNOWN_BYTES`] if unknown.
const USED_BYTES: u16 = 4;
/// Encodes an unknown number of bytes.
const UNKNOWN_BYTES: u64 = u64::MAX;
/// Maximum number of slots in [`USED_BYTES`], so that BEGIN stays within its size limit.
const MAX_USED_SLOTS: usize = 1024;
/// FINAL, mandatory, without content: another party paused the guest, and it must stay paused.
const PAUSED: u16 = 1;
/// ACCEPT: the algorithms that the destination can decode, one bit per algorithm number (u32).
const ALGORITHMS: u16 = 3;
/// ACCEPT, without content: the destination accepts VERIFY before FINAL.
const VERIFIES_PLACED: u16 = 4;
/// BEGIN: the number of fetch lanes for faults and in the background, a byte each.
const FETCH_LANES: u16 = 5;
/// BEGIN, mandatory: the name of the witness, as text.
const WITNESS: u16 = 6;
/// ACCEPT, without content: the destination can run the guest before all its pages have arrived.
const ACCEPTS_POST_COPY: u16 = 5;
/// ACCEPT: why it can't, as text.
const REFUSES_POST_COPY: u16 = 6;
/// ACCEPT, without content: the destination compares a sample of the guest's storage.
const COMPARES_STORAGE: u16 = 7;
/// FINAL, mandatory, without content: the destination lacks pages, which LACKING has named.
const POST_COPY: u16 = 2;
/// FINAL: a sample of the guest's storage, in the VMM's own format.
const STORAGE_SAMPLE: u16 = 3;
/// QUERY: the number of the first offered fetch lane, and as in [`FETCH_LANES`], a byte each.
const OFFER: u16 = 1;
/// QUERY and ANSWER: [`LateStreamsId`], a u64.
const LATE_STREAMS: u16 = 3;
/// ANSWER: the token of the offered fetch lanes.
const TOKEN: u16 = 1;
/// ANSWER with the word OWNS, without content: the guest has crashed while it lacked pages.
const ENDED: u16 = 2;

impl ControlMessage {
    /// Appends the message's fields.
    pub(crate) fn encode_fields(&self, into: &mut impl Buffer) {
        match self {
            Self::Begin { release, streams, used_bytes, fetch_lanes, witness, .. } => {
                put_release(into, release.as_ref());
                if *streams {
                    put_mandatory(into, STREAMS, &[]);
                }
                if (1..=MAX_USED_SLOTS).contains(&used_bytes.len()) {
                    let all = used_bytes.iter().map(|bytes| bytes.unwrap_or(UNKNOWN_BYTES));
                    let content: Vec<u8> = all.flat_map(u64::to_le_bytes).collect();
                    put_optional(into, USED_BYTES, &content);
                }
                if let Some(FetchLanes { faults, background }) = *fetch_lanes {
                    put_optional(into, FETCH_LANES, &[faults, background]);
                }
                if let Some(witness) = witness {
                    put_mandatory(into, WITNESS, witness.as_str().as_bytes());
                }
            }
            Self::Accept {
                release,
                algorithms,
                verifies_placed,
                post_copy,
                compares_storage,
                ..
            } => {
                put_release(into, release.as_ref());
                if let Some(algorithms) = algorithms {
                    put_optional(into, ALGORITHMS, &algorithms.bits().to_le_bytes());
                }
                if *verifies_placed {
                    put_optional(into, VERIFIES_PLACED, &[]);
                }
                match post_copy {
                    Some(Ok(())) => put_optional(into, ACCEPTS_POST_COPY, &[]),
                    Some(Err(why)) => put_optional(into, REFUSES_POST_COPY, why.as_bytes()),
                    None => {}
                }
                if *compares_storage {
                    put_optional(into, COMPARES_STORAGE, &[]);
                }
            }
            Self::Refuse { release, .. } => put_release(into, release.as_ref()),
            Self::Final { paused, kind, storage_sample, .. } => {
                if *paused {
                    put_mandatory(into, PAUSED, &[]);
                }
                if *kind == SessionKind::PostCopy {
                    put_mandatory(into, POST_COPY, &[]);
                }
                if !storage_sample.is_empty() {
                    put_optional(into, STORAGE_SAMPLE, storage_sample);
                }
            }
            Self::Query { offer: Some(LaneOffer { first, lanes, streams }), .. } => {
                put_optional(into, OFFER, &[*first, lanes.faults, lanes.background]);
                put_streams(into, *streams);
            }
            Self::Answer { word, token, .. } => {
                if let Some(LaneToken { token, streams }) = token {
                    put_optional(into, TOKEN, &token.0);
                    put_streams(into, *streams);
                }
                if *word == SessionWord::Ended {
                    put_optional(into, ENDED, &[]);
                }
            }
            _ => {}
        }
    }

    /// Stores a field in the message. Returns whether the field is optional or mandatory, or `None`
    /// if this message has no field with that number.
    pub(crate) fn take(&mut self, field: u16, content: &[u8]) -> Result<Option<Need>, String> {
        let mut need = Need::Optional;
        match (self, field) {
            (
                Self::Begin { release, .. }
                | Self::Accept { release, .. }
                | Self::Refuse { release, .. },
                RELEASE | VMM_RELEASE,
            ) => {
                let text = checked_name(content)?;
                let release = release
                    .get_or_insert_with(|| Release { vmferry: String::new(), vmm: String::new() });
                *(if field == RELEASE { &mut release.vmferry } else { &mut release.vmm }) = text;
            }
            (Self::Begin { streams, .. }, STREAMS) if content.is_empty() => {
                *streams = true;
                need = Need::Mandatory;
            }
            (Self::Begin { .. }, STREAMS) => return Err("it has no content".into()),
            (Self::Begin { used_bytes, .. }, USED_BYTES) => {
                let (all, rest) = content.as_chunks();
                if all.is_empty() || all.len() > MAX_USED_SLOTS || !rest.is_empty() {
                    return Err(format!("it has 8 to {} bytes", 8 * MAX_USED_SLOTS));
                }
                let all = all.iter().map(|bytes| u64::from_le_bytes(*bytes));
                *used_bytes =
                    all.map(|bytes| Some(bytes).filter(|bytes| *bytes != UNKNOWN_BYTES)).collect();
            }
            (Self::Final { paused, .. }, PAUSED) if content.is_empty() => {
                *paused = true;
                need = Need::Mandatory;
            }
            (Self::Final { kind, .. }, POST_COPY) if content.is_empty() => {
                *kind = SessionKind::PostCopy;
                need = Need::Mandatory;
            }
            (Self::Final { storage_sample, .. }, STORAGE_SAMPLE) if !content.is_empty() => {
                *storage_sample = content.to_vec();
            }
            (Self::Final { .. }, STORAGE_SAMPLE) => return Err("it is empty".into()),
            (Self::Final { .. }, PAUSED | POST_COPY) => {
                return Err("it has no content".into());
            }
            (Self::Accept { algorithms, .. }, ALGORITHMS) => {
                let bits = content.try_into().map_err(|_| "it has 4 bytes".to_owned())?;
                *algorithms = Some(AlgorithmSet::from_bits(u32::from_le_bytes(bits)));
            }
            (Self::Accept { verifies_placed, .. }, VERIFIES_PLACED) if content.is_empty() => {
                *verifies_placed = true;
            }
            (Self::Accept { compares_storage, .. }, COMPARES_STORAGE) if content.is_empty() => {
                *compares_storage = true;
            }
            (Self::Accept { post_copy, .. }, ACCEPTS_POST_COPY) if content.is_empty() => {
                *post_copy = Some(Ok(()));
            }
            (Self::Accept { post_copy: post_copy @ None, .. }, REFUSES_POST_COPY) => {
                *post_copy = Some(Err(checked_line(content)?));
            }
            (Self::Accept { .. }, REFUSES_POST_COPY) => return Err("it contradicts field 5".into()),
            (Self::Accept { .. }, VERIFIES_PLACED | ACCEPTS_POST_COPY | COMPARES_STORAGE) => {
                return Err("it has no content".into());
            }
            (Self::Begin { fetch_lanes, .. }, FETCH_LANES) => {
                let [faults, background] =
                    content.try_into().map_err(|_| "it has 2 bytes".to_owned())?;
                *fetch_lanes = Some(FetchLanes { faults, background });
            }
            (Self::Begin { witness, .. }, WITNESS) => {
                let name = std::str::from_utf8(content).map_err(|_| "it is not text".to_owned())?;
                *witness = Some(WitnessId::new(name).map_err(|error| error.to_string())?);
                need = Need::Mandatory;
            }
            (Self::Query { offer, .. }, OFFER) => {
                let [first, faults, background] =
                    content.try_into().map_err(|_| "it has 3 bytes".to_owned())?;
                let lanes = FetchLanes { faults, background };
                *offer = Some(LaneOffer { first, lanes, streams: None });
            }
            (Self::Query { offer: Some(offer), .. }, LATE_STREAMS) => {
                offer.streams = Some(streams(content)?);
            }
            (Self::Query { offer: None, .. }, LATE_STREAMS) => {
                return Err("it needs field 1".into());
            }
            (Self::Answer { token, .. }, TOKEN) => {
                let bytes = content.try_into().map_err(|_| "it has 16 bytes".to_owned())?;
                *token = Some(LaneToken { token: Token(bytes), streams: None });
            }
            (Self::Answer { token: Some(token), .. }, LATE_STREAMS) => {
                token.streams = Some(streams(content)?);
            }
            (Self::Answer { token: None, .. }, LATE_STREAMS) => {
                return Err("it needs field 1".into());
            }
            (Self::Answer { word: word @ SessionWord::Owns, .. }, ENDED) if content.is_empty() => {
                *word = SessionWord::Ended;
            }
            (Self::Answer { word: SessionWord::Owns, .. }, ENDED) => {
                return Err("it has no content".into());
            }
            (Self::Answer { .. }, ENDED) => return Err("it contradicts the word".into()),
            _ => return Ok(None),
        }
        Ok(Some(need))
    }
}

fn put_streams(into: &mut impl Buffer, streams: Option<LateStreamsId>) {
    if let Some(LateStreamsId(number)) = streams {
        put_optional(into, LATE_STREAMS, &number.to_le_bytes());
    }
}

fn streams(content: &[u8]) -> Result<LateStreamsId, String> {
    let bytes = content.try_into().map_err(|_| "it has 8 bytes".to_owned())?;
    Ok(LateStreamsId(u64::from_le_bytes(bytes)))
}

fn put_release(into: &mut impl Buffer, release: Option<&Release>) {
    let Some(release) = release else { return };
    for (number, name) in [(RELEASE, &release.vmferry), (VMM_RELEASE, &release.vmm)] {
        if !name.is_empty() {
            put_optional(into, number, name.as_bytes());
        }
    }
}
