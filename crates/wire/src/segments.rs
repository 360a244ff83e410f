//! The segment table of a frame that carries a piece of a VMM's own migration stream. It error how
//! each segment of the piece is encoded:
//!
//! ```text
//! | content hash (8) | pages with content (4) | zero pages (4) | segments, 8 bytes each |
//!
//! a segment: | length << 3 | encoding (4) | entry (4) |
//! ```
//! The segments cover the piece without gaps. The content hash is the XXH3-64 of the whole piece,
//! seeded with its offset in the stream. The page counts cover the pages that the source recognized
//! in the stream. They are statistics only.
//!
//! Both sides may *keep* a page in a numbered entry. A later version of the page can then be sent
//! as a delta against it.

use vmferry_memory::PAGE_SIZE;

use crate::error::WireError;
use crate::frame::FrameHeader;
use crate::sizes::{MAX_FRAME_PAYLOAD_BYTES, SEGMENT_BYTES, SEGMENT_TABLE_HEAD_BYTES};
use crate::{crc32c, field};

/// Maximum number of pages that each side keeps, over all lanes: 1 GiB. The lanes share the entries
/// evenly.
pub const MAX_KEPT_PAGES: u32 = 1 << 18;

/// The encoding of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentEncoding {
    /// 0: uncompressed.
    Raw,
    /// 1: compressed, together with all packed segments of the frame.
    Packed,
    /// 2: a page, as its differences from the page kept in this entry. It replaces that page.
    Delta(u32),
    /// 3: an uncompressed page, to be kept in this entry.
    KeptRaw(u32),
    /// 4: a page, compressed like [`Packed`](Self::Packed), to be kept in this entry.
    KeptPacked(u32),
}

/// A range of bytes of the piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Length of the decoded segment.
    pub bytes: u32,
    /// The encoding of the segment.
    pub encoding: SegmentEncoding,
}

impl Segment {
    /// Appends the segment to a table.
    pub fn encode(&self, into: &mut Vec<u8>) {
        let (number, entry) = match self.encoding {
            SegmentEncoding::Raw => (0, 0),
            SegmentEncoding::Packed => (1, 0),
            SegmentEncoding::Delta(entry) => (2, entry),
            SegmentEncoding::KeptRaw(entry) => (3, entry),
            SegmentEncoding::KeptPacked(entry) => (4, entry),
        };
        into.extend_from_slice(&(self.bytes << 3 | number).to_le_bytes());
        into.extend_from_slice(&entry.to_le_bytes());
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (word, entry) =
            (u32::from_le_bytes(field(bytes, 0)), u32::from_le_bytes(field(bytes, 4)));
        let encoding = match (word & 7, entry) {
            (0, 0) => SegmentEncoding::Raw,
            (1, 0) => SegmentEncoding::Packed,
            (2, entry) => SegmentEncoding::Delta(entry),
            (3, entry) => SegmentEncoding::KeptRaw(entry),
            (4, entry) => SegmentEncoding::KeptPacked(entry),
            _ => return None,
        };
        Some(Self { bytes: word >> 3, encoding })
    }

    /// Whether the segment's bytes are in the raw part of the payload.
    #[must_use]
    pub fn is_raw(&self) -> bool {
        matches!(self.encoding, SegmentEncoding::Raw | SegmentEncoding::KeptRaw(_))
    }

    /// Whether the segment's bytes are in the packed part of the payload, verbatim after
    /// decompression.
    #[must_use]
    pub fn is_packed(&self) -> bool {
        matches!(self.encoding, SegmentEncoding::Packed | SegmentEncoding::KeptPacked(_))
    }

    /// The entry that keeps the segment's page.
    #[must_use]
    pub fn entry(&self) -> Option<u32> {
        match self.encoding {
            SegmentEncoding::Raw | SegmentEncoding::Packed => None,
            SegmentEncoding::Delta(entry)
            | SegmentEncoding::KeptRaw(entry)
            | SegmentEncoding::KeptPacked(entry) => Some(entry),
        }
    }
}

/// The head of the segment table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PieceSummary {
    /// XXH3-64 of the whole piece, seeded with its offset in the stream.
    pub content_hash: u64,
    /// Number of recognized pages with content.
    pub content_pages: u32,
    /// Number of recognized zero pages.
    pub zero_pages: u32,
}

impl PieceSummary {
    /// Appends the head to an empty table.
    pub fn encode(&self, into: &mut Vec<u8>) {
        into.extend_from_slice(&self.content_hash.to_le_bytes());
        into.extend_from_slice(&self.content_pages.to_le_bytes());
        into.extend_from_slice(&self.zero_pages.to_le_bytes());
    }
}

/// A checked segment table: the lengths agree with the header, pages are whole, and entries exist.
#[derive(Clone, Copy, Debug)]
pub struct SegmentTable<'a> {
    summary: PieceSummary,
    segments: &'a [u8],
    piece_bytes: usize,
    packed_content_bytes: usize,
}

impl<'a> SegmentTable<'a> {
    /// Checks the table of a stream frame. `entries` is the number of pages that its lane may keep.
    ///
    /// # Errors
    /// A table that is damaged or violates a rule.
    pub fn parse(header: &FrameHeader, table: &'a [u8], entries: u32) -> Result<Self, WireError> {
        let bad = |text: String| Err(WireError::BadFrame(text));
        let expected = crc32c(table);
        if expected != header.table_checksum {
            let (what, found) = ("a segment table", header.table_checksum);
            return Err(WireError::Checksum { what, expected, found });
        }
        if table.len() != header.table_bytes() || table.len() < SEGMENT_TABLE_HEAD_BYTES {
            return bad(format!("a segment table of {} bytes", table.len()));
        }
        let (head, segments) = table.split_at(SEGMENT_TABLE_HEAD_BYTES);
        let summary = PieceSummary {
            content_hash: u64::from_le_bytes(field(head, 0)),
            content_pages: u32::from_le_bytes(field(head, 8)),
            zero_pages: u32::from_le_bytes(field(head, 12)),
        };
        let (mut piece, mut raw, mut packed, mut delta_pages) = (0_u64, 0_u64, 0_u64, 0_u64);
        for (index, bytes) in segments.chunks_exact(SEGMENT_BYTES).enumerate() {
            let Some(segment) = Segment::decode(bytes) else {
                return bad(format!("segment {index} has no known encoding"));
            };
            if let Some(entry) = segment.entry()
                && (segment.bytes as usize != PAGE_SIZE || entry >= entries)
            {
                let bytes = segment.bytes;
                return bad(format!(
                    "segment {index} keeps {bytes} bytes in entry {entry} of {entries}"
                ));
            }
            let bytes = u64::from(segment.bytes);
            piece += bytes;
            raw += if segment.is_raw() { bytes } else { 0 };
            packed += if segment.is_packed() { bytes } else { 0 };
            delta_pages += u64::from(matches!(segment.encoding, SegmentEncoding::Delta(_)));
        }
        let in_packed_part = u64::from(header.packed_bytes);
        if raw + in_packed_part != u64::from(header.payload_bytes) {
            return bad(format!(
                "{} bytes of payload, and {raw} raw and {in_packed_part} packed",
                header.payload_bytes
            ));
        }
        let delta = u64::from(header.delta_bytes);
        if header.algorithm.is_none() && (packed > 0 || in_packed_part != delta) {
            return bad(format!(
                "{packed} packed bytes and {delta} of deltas without an algorithm"
            ));
        }
        // Without this check, a piece without packed segments could smuggle packed bytes that are
        // never read.
        if packed + delta_pages == 0 && in_packed_part + delta > 0 {
            return bad(format!(
                "{in_packed_part} packed bytes and {delta} of deltas, which no segment uses"
            ));
        }
        if piece == 0 || piece > u64::from(MAX_FRAME_PAYLOAD_BYTES) {
            return bad(format!("a piece of {piece} bytes"));
        }
        Ok(Self {
            summary,
            segments,
            piece_bytes: piece as usize,
            packed_content_bytes: packed as usize,
        })
    }

    /// The head of the table.
    #[must_use]
    pub fn summary(&self) -> PieceSummary {
        self.summary
    }

    /// Length of the piece in bytes.
    #[must_use]
    pub fn piece_bytes(&self) -> usize {
        self.piece_bytes
    }

    /// Length of all packed segments in bytes. The records of all deltas follow them in the packed
    /// part.
    #[must_use]
    pub fn packed_content_bytes(&self) -> usize {
        self.packed_content_bytes
    }

    /// The segments in order.
    pub fn segments(&self) -> impl Iterator<Item = Segment> + 'a {
        self.segments.chunks_exact(SEGMENT_BYTES).filter_map(Segment::decode)
    }

    /// Whether the payload is the piece itself, and no page of it is kept.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.segments().all(|segment| segment.encoding == SegmentEncoding::Raw)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FrameKind, table_checksum};

    fn table(segments: &[Segment]) -> Vec<u8> {
        let mut table = Vec::new();
        let summary =
            PieceSummary { content_hash: 0x0102_0304_0506_0708, content_pages: 2, zero_pages: 3 };
        summary.encode(&mut table);
        segments.iter().for_each(|segment| segment.encode(&mut table));
        table
    }

    fn header(table: &[u8], payload: u32, packed: u32, delta: u32) -> FrameHeader {
        FrameHeader {
            kind: FrameKind::Stream,
            algorithm: (packed != delta).then_some(crate::Algorithm::Lz4),
            runs: ((table.len() - SEGMENT_TABLE_HEAD_BYTES) / SEGMENT_BYTES) as u32,
            payload_bytes: payload,
            packed_bytes: packed,
            delta_bytes: delta,
            table_checksum: table_checksum(table),
            ..FrameHeader::end_of_round(1, 1)
        }
    }

    const PAGE: u32 = PAGE_SIZE as u32;

    fn all() -> [Segment; 5] {
        [
            Segment { bytes: 8, encoding: SegmentEncoding::Raw },
            Segment { bytes: 9, encoding: SegmentEncoding::Packed },
            Segment { bytes: PAGE, encoding: SegmentEncoding::Delta(0) },
            Segment { bytes: PAGE, encoding: SegmentEncoding::KeptRaw(1) },
            Segment { bytes: PAGE, encoding: SegmentEncoding::KeptPacked(2) },
        ]
    }

    #[test]
    fn golden_bytes() {
        let bytes = table(&all());
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            hex,
            "08070605040302010200000003000000400000000000000049000000000000000280000000000000\
             03800000010000000480000002000000"
        );
        let header = header(&bytes, 8 + PAGE + 100, 100, 7);
        let parsed = SegmentTable::parse(&header, &bytes, 3).unwrap();
        assert_eq!(parsed.segments().collect::<Vec<_>>(), all());
        assert_eq!(parsed.piece_bytes(), 17 + 3 * PAGE_SIZE);
        assert_eq!(parsed.packed_content_bytes(), 9 + PAGE_SIZE);
        assert_eq!(parsed.summary().zero_pages, 3);
        assert!(!parsed.is_plain());
    }

    #[test]
    fn parse_refuses_inconsistent_tables() {
        let good = table(&all());
        let fine = header(&good, 8 + PAGE + 100, 100, 7);
        let error = |header: &FrameHeader, table: &[u8], entries| {
            SegmentTable::parse(header, table, entries).unwrap_err().to_string()
        };
        assert!(error(&fine, &good, 2).contains("entry 2 of 2"));
        let short = FrameHeader { payload_bytes: 8 + PAGE + 99, ..fine };
        assert!(error(&short, &good, 3).contains("bytes of payload"));
        let as_is = FrameHeader { algorithm: None, ..fine };
        assert!(error(&as_is, &good, 3).contains("without an algorithm"));
        let mut damaged = good.clone();
        damaged[20] ^= 1;
        assert!(error(&fine, &damaged, 3).contains("checksum"));
        for (segment, text) in [
            (Segment { bytes: 8, encoding: SegmentEncoding::KeptRaw(0) }, "keeps 8 bytes"),
            (Segment { bytes: 0, encoding: SegmentEncoding::Raw }, "piece of 0"),
            (
                Segment { bytes: MAX_FRAME_PAYLOAD_BYTES + 1, encoding: SegmentEncoding::Raw },
                "bytes of payload",
            ),
        ] {
            let bytes = table(&[segment]);
            let header =
                header(&bytes, if segment.bytes > PAGE { PAGE } else { segment.bytes }, 0, 0);
            assert!(error(&header, &bytes, 3).contains(text), "{segment:?}");
        }
        let unknown = [&good[..SEGMENT_TABLE_HEAD_BYTES], &[5, 0, 0, 0, 0, 0, 0, 0]].concat();
        assert!(error(&header(&unknown, 0, 0, 0), &unknown, 3).contains("no known encoding"));
    }

    #[test]
    fn parse_refuses_an_unused_packed_part() {
        for encoding in [SegmentEncoding::Raw, SegmentEncoding::KeptRaw(0)] {
            let table = table(&[Segment { bytes: PAGE, encoding }]);
            for (packed, delta) in [(9, 0), (9, 9), (9, 20), (0, 20)] {
                let header = header(&table, PAGE + packed, packed, delta);
                let error = SegmentTable::parse(&header, &table, 3).unwrap_err().to_string();
                assert!(error.contains("no segment uses"), "{encoding:?}: {error}");
            }
        }
    }
}
