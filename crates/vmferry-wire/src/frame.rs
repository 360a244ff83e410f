//! Frames of pages on a data channel.
//!
//! ```text
//!  0       4      5   6      8       12     16         24              28  32            40          44
//!  +-------+------+---+------+-------+------+----------+---------------+---+-------------+-----------+-----+
//!  | magic | kind | 0 | slot | round | runs | sequence | payload bytes | 0 | content sum | table CRC | CRC |
//!  +-------+------+---+------+-------+------+----------+---------------+---+-------------+-----------+-----+ 48
//!  followed by `runs` entries of the run table, 16 bytes each:
//!  | first page (8) | pages (4) | encoding (1) | 0 (3) |
//!  followed by the payload: the runs' encoded pages, one run after the other.
//! ```
//! The CRC covers the 44 bytes before it, the table CRC the run table, and the content sum (the
//! wrapping sum of `vmferry_memory::page_hash` of all pages of the frame, pages of zeros
//! included) the decoded pages and their places.

use vmferry_memory::{PAGE_SIZE, PageRun, SlotId};

use crate::error::WireError;
use crate::{crc32c, field};

/// Length of a frame's header.
pub const FRAME_HEADER_BYTES: usize = 48;
/// Length of an entry of the run table.
pub const RUN_HEADER_BYTES: usize = 16;
/// Longest payload: twice the pages of a frame as this release sends it.
pub const MAX_FRAME_PAYLOAD_BYTES: u32 = 512 << 10;
/// Most runs in a frame.
pub const MAX_FRAME_RUNS: u32 = 512;
/// Most pages in a frame, pages of zeros included.
const MAX_FRAME_PAGES: u64 = 64 << 10;

/// "VFPG", read as a little-endian number.
const FRAME_MAGIC: u32 = u32::from_le_bytes(*b"VFPG");

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// 1: pages.
    Pages,
    /// 2: the lane has sent all of the round; no runs, no payload.
    EndOfRound,
}

/// How the pages of a run are encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// 0: all bytes are zero; nothing in the payload.
    Zero,
    /// 1: the bytes as they are, [`PAGE_SIZE`] for each page.
    Raw,
}

impl Encoding {
    fn payload_bytes(self, pages: u64) -> u64 {
        match self {
            Self::Zero => 0,
            Self::Raw => pages * PAGE_SIZE as u64,
        }
    }
}

/// A frame's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// What it is.
    pub kind: FrameKind,
    /// The slot that all its pages are in.
    pub slot: SlotId,
    /// The round, from 1.
    pub round: u32,
    /// Entries of the run table.
    pub runs: u32,
    /// The frame's number on its lane: 1, 2, 3 …
    pub sequence: u64,
    /// Length of the payload.
    pub payload_bytes: u32,
    /// Wrapping sum of the hashes of all pages of the frame.
    pub content_sum: u64,
    /// CRC-32C of the run table.
    pub table_checksum: u32,
}

impl FrameHeader {
    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_HEADER_BYTES] {
        let mut bytes = [0; FRAME_HEADER_BYTES];
        bytes[0..4].copy_from_slice(&FRAME_MAGIC.to_le_bytes());
        bytes[4] = match self.kind {
            FrameKind::Pages => 1,
            FrameKind::EndOfRound => 2,
        };
        bytes[6..8].copy_from_slice(&self.slot.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.round.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.runs.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.content_sum.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.table_checksum.to_le_bytes());
        let checksum = crc32c(&bytes[..44]);
        bytes[44..48].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// From bytes, with every length checked against its limit.
    ///
    /// # Errors
    /// Bytes that are no frame header, damaged, or beyond a limit.
    pub fn parse(bytes: &[u8; FRAME_HEADER_BYTES]) -> Result<Self, WireError> {
        let magic = u32::from_le_bytes(field(bytes, 0));
        if magic != FRAME_MAGIC {
            return Err(WireError::BadMagic(magic));
        }
        let (expected, found) = (crc32c(&bytes[..44]), u32::from_le_bytes(field(bytes, 44)));
        if expected != found {
            return Err(WireError::Checksum { what: "a frame header", expected, found });
        }
        let bad = |text: String| Err(WireError::BadFrame(text));
        let kind = match bytes[4] {
            1 => FrameKind::Pages,
            2 => FrameKind::EndOfRound,
            other => return bad(format!("unknown kind {other}")),
        };
        if bytes[5] != 0 || bytes[28..32] != [0; 4] {
            return Err(WireError::Reserved("a frame header"));
        }
        let header = Self {
            kind,
            slot: SlotId(u16::from_le_bytes(field(bytes, 6))),
            round: u32::from_le_bytes(field(bytes, 8)),
            runs: u32::from_le_bytes(field(bytes, 12)),
            sequence: u64::from_le_bytes(field(bytes, 16)),
            payload_bytes: u32::from_le_bytes(field(bytes, 24)),
            content_sum: u64::from_le_bytes(field(bytes, 32)),
            table_checksum: u32::from_le_bytes(field(bytes, 40)),
        };
        if header.runs > MAX_FRAME_RUNS {
            return bad(format!("{} runs, at most {MAX_FRAME_RUNS} are allowed", header.runs));
        }
        if header.payload_bytes > MAX_FRAME_PAYLOAD_BYTES {
            return bad(format!(
                "{} bytes of payload, at most {MAX_FRAME_PAYLOAD_BYTES} are allowed",
                header.payload_bytes
            ));
        }
        let empty = header.runs == 0 && header.payload_bytes == 0 && header.content_sum == 0;
        match kind {
            FrameKind::EndOfRound if !empty => bad("an end of round with pages".into()),
            FrameKind::Pages if header.runs == 0 => bad("a frame without pages".into()),
            _ => Ok(header),
        }
    }

    /// Length of the run table in bytes.
    #[must_use]
    pub fn table_bytes(&self) -> usize {
        self.runs as usize * RUN_HEADER_BYTES
    }
}

/// A run of pages and how they are encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Index of the first page within the slot.
    pub first: u64,
    /// Number of pages.
    pub pages: u32,
    /// How they are encoded.
    pub encoding: Encoding,
}

impl Run {
    /// Appends the run's entry of the run table.
    pub fn encode(&self, into: &mut Vec<u8>) {
        into.extend_from_slice(&self.first.to_le_bytes());
        into.extend_from_slice(&self.pages.to_le_bytes());
        into.extend_from_slice(&[
            match self.encoding {
                Encoding::Zero => 0,
                Encoding::Raw => 1,
            },
            0,
            0,
            0,
        ]);
    }

    /// Length of its pages in the payload.
    #[must_use]
    pub fn payload_bytes(&self) -> usize {
        self.encoding.payload_bytes(self.pages.into()) as usize
    }

    /// Its pages.
    #[must_use]
    pub fn in_slot(&self, slot: SlotId) -> PageRun {
        PageRun { slot, first: self.first, pages: self.pages.into() }
    }
}

/// The checksum of a run table, for [`FrameHeader::table_checksum`].
#[must_use]
pub fn table_checksum(table: &[u8]) -> u32 {
    crc32c(table)
}

/// A checked run table: the runs ascend, do not overlap, lie within their slot, and their
/// payloads add up to the frame's.
#[derive(Clone, Copy, Debug)]
pub struct RunTable<'a> {
    bytes: &'a [u8],
}

impl<'a> RunTable<'a> {
    /// Checks a run table. `slot_pages` is the length of the header's slot in pages.
    ///
    /// # Errors
    /// A damaged table, or one that breaks a rule above.
    pub fn parse(
        header: &FrameHeader,
        bytes: &'a [u8],
        slot_pages: u64,
    ) -> Result<Self, WireError> {
        let expected = crc32c(bytes);
        if bytes.len() != header.table_bytes() || expected != header.table_checksum {
            return Err(WireError::Checksum {
                what: "a run table",
                expected,
                found: header.table_checksum,
            });
        }
        let bad = |text: String| Err(WireError::BadFrame(text));
        let (mut free_from, mut payload, mut pages) = (0_u64, 0_u64, 0_u64);
        for entry in bytes.chunks_exact(RUN_HEADER_BYTES) {
            let Some(run) = read_run(entry) else {
                return bad(format!("unknown encoding {} or reserved bits", entry[12]));
            };
            let end = run.first.checked_add(run.pages.into());
            let Some(end) = end.filter(|end| *end <= slot_pages && run.pages > 0) else {
                return bad(format!(
                    "{} pages from page {} of {}, which has {slot_pages}",
                    run.pages, run.first, header.slot
                ));
            };
            if run.first < free_from {
                return bad(format!("page {} stands out of order", run.first));
            }
            free_from = end;
            pages += u64::from(run.pages);
            payload += run.encoding.payload_bytes(run.pages.into());
        }
        if payload != u64::from(header.payload_bytes) {
            return bad(format!(
                "{} bytes of payload for runs that need {payload}",
                header.payload_bytes
            ));
        }
        if pages > MAX_FRAME_PAGES {
            return bad(format!("{pages} pages, at most {MAX_FRAME_PAGES} are allowed"));
        }
        Ok(Self { bytes })
    }

    /// The runs, ascending.
    pub fn runs(&self) -> impl Iterator<Item = Run> + 'a {
        self.bytes.chunks_exact(RUN_HEADER_BYTES).filter_map(read_run)
    }
}

fn read_run(entry: &[u8]) -> Option<Run> {
    let encoding = match entry[12..16] {
        [0, 0, 0, 0] => Encoding::Zero,
        [1, 0, 0, 0] => Encoding::Raw,
        _ => return None,
    };
    Some(Run {
        first: u64::from_le_bytes(field(entry, 0)),
        pages: u32::from_le_bytes(field(entry, 8)),
        encoding,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn table(runs: &[Run]) -> Vec<u8> {
        let mut bytes = Vec::new();
        runs.iter().for_each(|run| run.encode(&mut bytes));
        bytes
    }

    fn header(table: &[u8], payload_bytes: u32) -> FrameHeader {
        FrameHeader {
            kind: FrameKind::Pages,
            slot: SlotId(3),
            round: 2,
            runs: (table.len() / RUN_HEADER_BYTES) as u32,
            sequence: 9,
            payload_bytes,
            content_sum: 0x0102_0304_0506_0708,
            table_checksum: table_checksum(table),
        }
    }

    const RAW: Run = Run { first: 5, pages: 2, encoding: Encoding::Raw };
    const ZERO: Run = Run { first: 9, pages: 1, encoding: Encoding::Zero };

    #[test]
    fn golden_bytes() {
        let table = table(&[RAW, ZERO]);
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        assert_eq!(hex(&table), "0500000000000000020000000100000009000000000000000100000000000000");
        let bytes = header(&table, 8192).encode();
        assert_eq!(
            hex(&bytes[..40]),
            "5646504701000300020000000200000009000000000000000020000000000000\
             0807060504030201"
        );
        assert_eq!(FrameHeader::parse(&bytes), Ok(header(&table, 8192)));
    }

    #[test]
    fn every_damaged_bit_of_a_header_is_noticed() {
        let good = header(&table(&[RAW]), 8192).encode();
        for bit in 0..good.len() * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(FrameHeader::parse(&bad).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn tables_that_break_a_rule_are_refused() {
        let raw = |first, pages| Run { first, pages, encoding: Encoding::Raw };
        let cases = [
            (vec![raw(99, 2)], 8192, "2 pages from page 99 of slot 3, which has 100"),
            (vec![raw(u64::MAX, 2)], 8192, "which has 100"),
            (vec![raw(1, 0)], 0, "0 pages from page 1"),
            (vec![raw(5, 2), raw(6, 1)], 12288, "page 6 stands out of order"),
            (vec![raw(5, 2)], 4096, "4096 bytes of payload for runs that need 8192"),
        ];
        for (runs, payload, expected) in cases {
            let table = table(&runs);
            let error = RunTable::parse(&header(&table, payload), &table, 100).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
        let mut unknown = table(&[RAW]);
        unknown[12] = 7;
        let error = RunTable::parse(&header(&unknown, 8192), &unknown, 100).unwrap_err();
        assert!(error.to_string().contains("unknown encoding 7"), "{error}");
        let good = table(&[RAW]);
        let error = RunTable::parse(&header(&good, 8192), &unknown, 100).unwrap_err();
        assert!(matches!(error, WireError::Checksum { what: "a run table", .. }));
    }

    #[test]
    fn limits_are_checked_in_the_header() {
        let table = table(&[RAW]);
        let good = header(&table, 8192);
        let cases = [
            FrameHeader { runs: MAX_FRAME_RUNS + 1, ..good },
            FrameHeader { payload_bytes: MAX_FRAME_PAYLOAD_BYTES + 1, ..good },
            FrameHeader { runs: 0, ..good },
            FrameHeader { kind: FrameKind::EndOfRound, ..good },
        ];
        for bad in cases {
            assert!(matches!(FrameHeader::parse(&bad.encode()), Err(WireError::BadFrame(_))));
        }
        let end = FrameHeader {
            kind: FrameKind::EndOfRound,
            runs: 0,
            payload_bytes: 0,
            content_sum: 0,
            ..good
        };
        assert_eq!(FrameHeader::parse(&end.encode()), Ok(end));
    }

    proptest! {
        #[test]
        fn tables_round_trip(parts in prop::collection::vec((0_u64..50, 1_u32..20, any::<bool>()), 1..30)) {
            let mut runs = Vec::new();
            let (mut at, mut payload) = (0, 0);
            for (gap, pages, raw) in parts {
                let encoding = if raw { Encoding::Raw } else { Encoding::Zero };
                runs.push(Run { first: at + gap, pages, encoding });
                at += gap + u64::from(pages);
                payload += encoding.payload_bytes(pages.into());
            }
            prop_assume!(payload <= u64::from(MAX_FRAME_PAYLOAD_BYTES));
            let table = table(&runs);
            let header = header(&table, payload as u32);
            let parsed = RunTable::parse(&header, &table, at).unwrap();
            prop_assert_eq!(parsed.runs().collect::<Vec<_>>(), runs);
            prop_assert!(RunTable::parse(&header, &table, at - 1).is_err());
        }

        #[test]
        fn any_bytes_never_panic(
            bytes in prop::array::uniform32(any::<u8>()), slot_pages in any::<u64>(), payload in any::<u32>()
        ) {
            let _ = RunTable::parse(&header(&bytes, payload), &bytes, slot_pages);
        }
    }
}
