//! The wire format, sans-IO: converts between bytes and typed values.
//!
//! A channel begins with a [`Hello`] and its [`HelloReply`]. Their layouts are frozen, so that any
//! two releases can exchange their versions. A control channel then carries [`ControlMessage`]s in
//! both directions, each after a [`ControlHeader`]. A data channel carries frames from source to
//! destination. A frame is a [`FrameHeader`], a table and a payload, which holds pages
//! ([`RunTable`]) or pieces of a VMM's own stream ([`SegmentTable`]). `docs/protocol.md` is the
//! specification.
//!
//! Two sides speak the newest protocol version that both know ([`common_version`]). Versions 1 and
//! 2 differ only in the bodies of control messages.
//!
//! Input from the wire is not trusted. Each length is checked against the limit of its kind before
//! memory is allocated, each number is checked before it is used, and leftover bytes are an error.
//! All integers are little-endian.

#![forbid(unsafe_code)]

mod algorithm;
mod body;
mod control;
mod error;
mod fields;
mod frame;
mod hello;
mod message;
pub mod number;
mod probe;
mod reason;
mod release;
mod request;
mod runs;
mod segments;
mod session;
mod sizes;
mod tunnel;

pub use algorithm::{Algorithm, AlgorithmSet};
pub use control::{
    Buffer, CONTROL_HEADER_BYTES, ControlHeader, Decoded, MAX_BODY_BYTES, MAX_FINAL_BYTES,
};
pub use error::WireError;
pub use frame::{FRAME_HEADER_BYTES, FrameHeader, FrameKind, MAX_FRAME_RUNS};
pub use hello::{
    HELLO_BYTES, HELLO_REPLY_BYTES, Hello, HelloReply, HelloStatus, PROTOCOL_VERSION_MAX,
    PROTOCOL_VERSION_MIN, Role, common_version,
};
pub use message::{
    ControlMessage, FetchLanes, LaneOffer, LaneToken, LateStreamsId, MAX_CONFIG_BYTES,
    MAX_FREE_RUNS, MAX_LACKING_BYTES, MAX_LANES, MAX_SLOTS, MAX_STORAGE_SAMPLE_BYTES,
};
pub use probe::{
    Compared, MAX_FACTS_BYTES, MAX_PROBE_BYTES, MAX_REFUSAL_BYTES, ProbeHeader, ProbeMessage,
};
pub use reason::{MAX_REASON_BYTES, Reason, ReasonCode, one_line};
pub use request::{MAX_REQUEST_PAGES, PAGE_REQUEST_BYTES, PageRequest};
pub use runs::{Encoding, MAX_FRAME_CONTENT_PAGES, Run, RunTable, table_checksum};
pub use segments::{MAX_KEPT_PAGES, PieceSummary, Segment, SegmentEncoding, SegmentTable};
pub use session::Token;
pub use sizes::{
    MAX_FRAME_PAYLOAD_BYTES, RUN_HEADER_BYTES, SEGMENT_BYTES, SEGMENT_TABLE_HEAD_BYTES,
};
pub use tunnel::{MAX_TUNNEL_BYTES, TUNNEL_HEADER_BYTES, TunnelHeader};
pub use vmferry_api::{MAX_RELEASE_BYTES, Release};
pub use vmferry_handover::{GuestIdentity, MAX_NAME_BYTES, SessionId, SessionKind, SessionWord};

/// CRC-32C (Castagnoli), the checksum of headers and control messages.
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    // The function returns a 32-bit checksum in the low half of a u64.
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// Reads `N` bytes at an offset of a fixed-size header. All offsets are constants of this crate.
pub(crate) fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&bytes[at..at + N]);
    field
}
