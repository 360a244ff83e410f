//! Frames of pages on a data channel.
//!
//! ```text
//!  offset  bytes  field
//!       0      4  magic
//!       4      1  kind
//!       5      1  algorithm
//!       6      2  slot
//!       8      4  round
//!      12      4  runs
//!      16      8  sequence
//!      24      4  payload bytes
//!      28      4  packed bytes
//!      32      4  delta bytes
//!      36      4  table CRC
//!      40      4  CRC
//!      44         the run table, see `runs.rs`, and then the payload:
//!
//!  | the pages of all raw runs, 4096 bytes each | packed bytes |
//! ```
//! The packed part holds the pages of all packed runs and then the records of all delta runs, which
//! are `delta bytes` long. It is compressed with the frame's algorithm, if the frame has one. The
//! CRC covers the 40 bytes before it. The table CRC covers the run table, whose entries each have a
//! sum of their decoded pages.

use vmferry_memory::SlotId;

use crate::algorithm::Algorithm;
use crate::error::WireError;
use crate::sizes::{
    MAX_FRAME_PAYLOAD_BYTES, RUN_HEADER_BYTES, SEGMENT_BYTES, SEGMENT_TABLE_HEAD_BYTES,
};
use crate::{crc32c, field};

/// Length of a frame's header.
pub const FRAME_HEADER_BYTES: usize = 44;
/// Maximum number of runs in a frame.
pub const MAX_FRAME_RUNS: u32 = 512;

/// "VFPG", read as a little-endian number.
const FRAME_MAGIC: u32 = u32::from_le_bytes(*b"VFPG");

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// 1: pages.
    Pages,
    /// 2: the lane has sent all of its pages of the round; no runs, no payload.
    EndOfRound,
    /// 3: a piece of a VMM's own stream. Its table is a segment table, see `segments.rs`.
    Stream,
}

/// A frame's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// The kind of the frame.
    pub kind: FrameKind,
    /// How the packed part is compressed; `None` if it is not.
    pub algorithm: Option<Algorithm>,
    /// The slot of all pages in the frame.
    pub slot: SlotId,
    /// The round, from 1.
    pub round: u32,
    /// Number of entries in the run table or the segment table.
    pub runs: u32,
    /// The frame's number on its lane: 1, 2, 3 …
    pub sequence: u64,
    /// Length of the payload.
    pub payload_bytes: u32,
    /// Length of the packed part, which follows the raw pages in the payload.
    pub packed_bytes: u32,
    /// Length of the records of all delta runs, before compression.
    pub delta_bytes: u32,
    /// CRC-32C of the table.
    pub table_checksum: u32,
}

impl FrameHeader {
    /// The frame that ends a lane's part of a round.
    #[must_use]
    pub fn end_of_round(round: u32, sequence: u64) -> Self {
        Self {
            kind: FrameKind::EndOfRound,
            algorithm: None,
            slot: SlotId(0),
            round,
            runs: 0,
            sequence,
            payload_bytes: 0,
            packed_bytes: 0,
            delta_bytes: 0,
            table_checksum: crc32c(&[]),
        }
    }

    /// Encodes the header.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_HEADER_BYTES] {
        let mut bytes = [0; FRAME_HEADER_BYTES];
        bytes[0..4].copy_from_slice(&FRAME_MAGIC.to_le_bytes());
        bytes[4] = match self.kind {
            FrameKind::Pages => 1,
            FrameKind::EndOfRound => 2,
            FrameKind::Stream => 3,
        };
        bytes[5] = self.algorithm.map_or(0, Algorithm::number);
        bytes[6..8].copy_from_slice(&self.slot.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.round.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.runs.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.packed_bytes.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.delta_bytes.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.table_checksum.to_le_bytes());
        let checksum = crc32c(&bytes[..40]);
        bytes[40..44].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Parses a header, and checks every length against its limit.
    ///
    /// # Errors
    /// Bytes that are not a frame header, damaged bytes, or a value beyond its limit.
    pub fn parse(bytes: &[u8; FRAME_HEADER_BYTES]) -> Result<Self, WireError> {
        let magic = u32::from_le_bytes(field(bytes, 0));
        if magic != FRAME_MAGIC {
            return Err(WireError::BadMagic(magic));
        }
        let (expected, found) = (crc32c(&bytes[..40]), u32::from_le_bytes(field(bytes, 40)));
        if expected != found {
            return Err(WireError::Checksum { what: "a frame header", expected, found });
        }
        let bad = |text: String| Err(WireError::BadFrame(text));
        let kind = match bytes[4] {
            1 => FrameKind::Pages,
            2 => FrameKind::EndOfRound,
            3 => FrameKind::Stream,
            other => return bad(format!("unknown kind {other}")),
        };
        let algorithm = match bytes[5] {
            0 => None,
            number => match Algorithm::from_number(number) {
                Some(algorithm) => Some(algorithm),
                None => return bad(format!("unknown compression algorithm {number}")),
            },
        };
        let header = Self {
            kind,
            algorithm,
            slot: SlotId(u16::from_le_bytes(field(bytes, 6))),
            round: u32::from_le_bytes(field(bytes, 8)),
            runs: u32::from_le_bytes(field(bytes, 12)),
            sequence: u64::from_le_bytes(field(bytes, 16)),
            payload_bytes: u32::from_le_bytes(field(bytes, 24)),
            packed_bytes: u32::from_le_bytes(field(bytes, 28)),
            delta_bytes: u32::from_le_bytes(field(bytes, 32)),
            table_checksum: u32::from_le_bytes(field(bytes, 36)),
        };
        if header.runs > MAX_FRAME_RUNS {
            return bad(format!("{} runs, at most {MAX_FRAME_RUNS} are allowed", header.runs));
        }
        let longest = header.payload_bytes.max(header.delta_bytes);
        if longest > MAX_FRAME_PAYLOAD_BYTES {
            return bad(format!(
                "{longest} bytes of payload, at most {MAX_FRAME_PAYLOAD_BYTES} are allowed"
            ));
        }
        let empty = Self { slot: header.slot, ..Self::end_of_round(header.round, header.sequence) };
        match kind {
            FrameKind::EndOfRound if header != empty => bad("an end of round with pages".into()),
            FrameKind::Pages | FrameKind::Stream if header.runs == 0 => {
                bad("a frame without content".into())
            }
            FrameKind::Stream if header.slot != SlotId(0) => {
                bad("a piece of a stream in a slot".into())
            }
            _ => Ok(header),
        }
    }

    /// Length of the table in bytes.
    #[must_use]
    pub fn table_bytes(&self) -> usize {
        match self.kind {
            FrameKind::Pages | FrameKind::EndOfRound => self.runs as usize * RUN_HEADER_BYTES,
            FrameKind::Stream => SEGMENT_TABLE_HEAD_BYTES + self.runs as usize * SEGMENT_BYTES,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> FrameHeader {
        FrameHeader {
            kind: FrameKind::Pages,
            algorithm: Some(Algorithm::Zstd),
            slot: SlotId(3),
            round: 2,
            runs: 2,
            sequence: 9,
            payload_bytes: 8200,
            packed_bytes: 8,
            delta_bytes: 5,
            table_checksum: 0x0102_0304,
        }
    }

    #[test]
    fn golden_bytes() {
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        let bytes = header().encode();
        assert_eq!(
            hex(&bytes),
            "5646504701020300020000000200000009000000000000000820000008000000\
             05000000040302010429501f"
        );
        assert_eq!(FrameHeader::parse(&bytes), Ok(header()));
    }

    #[test]
    fn parse_detects_every_damaged_bit() {
        let good = header().encode();
        for bit in 0..good.len() * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(FrameHeader::parse(&bad).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn parse_checks_limits() {
        let good = header();
        let cases = [
            FrameHeader { runs: MAX_FRAME_RUNS + 1, ..good },
            FrameHeader { payload_bytes: MAX_FRAME_PAYLOAD_BYTES + 1, ..good },
            FrameHeader { delta_bytes: MAX_FRAME_PAYLOAD_BYTES + 1, ..good },
            FrameHeader { runs: 0, ..good },
            FrameHeader { kind: FrameKind::EndOfRound, ..good },
            FrameHeader { kind: FrameKind::Stream, ..good },
            FrameHeader { kind: FrameKind::Stream, slot: SlotId(0), runs: 0, ..good },
        ];
        for bad in cases {
            assert!(matches!(FrameHeader::parse(&bad.encode()), Err(WireError::BadFrame(_))));
        }
        let mut unknown = good.encode();
        unknown[5] = 77;
        let checksum = crc32c(&unknown[..40]);
        unknown[40..].copy_from_slice(&checksum.to_le_bytes());
        let error = FrameHeader::parse(&unknown).unwrap_err();
        assert!(error.to_string().contains("unknown compression algorithm 77"), "{error}");
        let end = FrameHeader::end_of_round(4, 8);
        assert_eq!(FrameHeader::parse(&end.encode()), Ok(end));
    }
}
