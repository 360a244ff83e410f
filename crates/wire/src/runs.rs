//! The run table of a frame: the pages of the frame, the encoding of each run of pages, and the sum
//! of their hashes. Each entry is 24 bytes:
//!
//! ```text
//! | first page (8) | pages (4) | encoding (1) | 0 (3) | content sum (8) |
//! ```
//! The content sum is the wrapping sum of `vmferry_memory::page_hash` of the run's decoded pages.

use vmferry_memory::{PAGE_SIZE, PageRun, SlotId};

use crate::error::WireError;
use crate::frame::FrameHeader;
use crate::sizes::{MAX_FRAME_PAYLOAD_BYTES, RUN_HEADER_BYTES};
use crate::{crc32c, field};

/// Maximum number of pages in a frame, including zero pages.
const MAX_FRAME_PAGES: u64 = 64 << 10;

/// Maximum number of nonzero pages in a frame. It bounds the memory that decoding a frame takes.
pub const MAX_FRAME_CONTENT_PAGES: u64 = MAX_FRAME_PAYLOAD_BYTES as u64 / PAGE_SIZE as u64;

/// How the pages of a run are encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// 0: all bytes are zero; no payload.
    Zero,
    /// 1: uncompressed, [`PAGE_SIZE`] bytes per page.
    Raw,
    /// 2: compressed, together with all packed runs of the frame.
    Packed,
    /// 3: the wrapping sum of the hashes of the base pages (8 bytes), and then each page's
    /// differences from its base page.
    Delta,
}

impl Encoding {
    fn number(self) -> u8 {
        match self {
            Self::Zero => 0,
            Self::Raw => 1,
            Self::Packed => 2,
            Self::Delta => 3,
        }
    }
}

/// A run of pages and how they are encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Index of the first page within the slot.
    pub first: u64,
    /// Number of pages.
    pub pages: u32,
    /// The encoding of the pages.
    pub encoding: Encoding,
    /// Wrapping sum of the hashes of its pages.
    pub content_sum: u64,
}

impl Run {
    /// Appends the run's entry of the run table.
    pub fn encode(&self, into: &mut Vec<u8>) {
        into.extend_from_slice(&self.first.to_le_bytes());
        into.extend_from_slice(&self.pages.to_le_bytes());
        into.extend_from_slice(&[self.encoding.number(), 0, 0, 0]);
        into.extend_from_slice(&self.content_sum.to_le_bytes());
    }

    fn decode(entry: &[u8]) -> Option<Self> {
        let encoding = match entry[12..16] {
            [0, 0, 0, 0] => Encoding::Zero,
            [1, 0, 0, 0] => Encoding::Raw,
            [2, 0, 0, 0] => Encoding::Packed,
            [3, 0, 0, 0] => Encoding::Delta,
            _ => return None,
        };
        Some(Self {
            first: u64::from_le_bytes(field(entry, 0)),
            pages: u32::from_le_bytes(field(entry, 8)),
            encoding,
            content_sum: u64::from_le_bytes(field(entry, 16)),
        })
    }

    /// The run as pages of a slot.
    #[must_use]
    pub fn in_slot(&self, slot: SlotId) -> PageRun {
        PageRun { slot, first: self.first, pages: self.pages.into() }
    }

    /// Page numbers of the run.
    #[must_use]
    pub fn range(&self) -> std::ops::Range<u64> {
        self.first..self.first + u64::from(self.pages)
    }

    /// Length of the decoded pages in bytes.
    #[must_use]
    pub fn content_bytes(&self) -> usize {
        self.pages as usize * PAGE_SIZE
    }
}

/// The checksum of a run table, for [`FrameHeader::table_checksum`].
#[must_use]
pub fn table_checksum(table: &[u8]) -> u32 {
    crc32c(table)
}

/// A checked run table. The runs ascend, do not overlap and lie within their slot. The lengths of
/// raw, packed and delta runs agree with the header.
#[derive(Clone, Copy, Debug)]
pub struct RunTable<'a> {
    bytes: &'a [u8],
    packed_pages: usize,
}

/// Number of pages in a frame, by encoding.
#[derive(Clone, Copy, Debug, Default)]
struct Pages {
    all: u64,
    raw: u64,
    packed: u64,
    delta: u64,
}

impl<'a> RunTable<'a> {
    /// Checks a run table. `slot_pages` is the size of the header's slot in pages.
    ///
    /// # Errors
    /// A damaged table, or one that violates a rule in the type's documentation.
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
        let (mut free_from, mut pages) = (0_u64, Pages::default());
        for entry in bytes.chunks_exact(RUN_HEADER_BYTES) {
            let Some(run) = Run::decode(entry) else {
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
                return bad(format!("page {} is out of order", run.first));
            }
            free_from = end;
            let count = u64::from(run.pages);
            pages.all += count;
            match run.encoding {
                Encoding::Zero => {}
                Encoding::Raw => pages.raw += count,
                Encoding::Packed => pages.packed += count,
                Encoding::Delta => pages.delta += count,
            }
        }
        check_lengths(header, pages).map_err(WireError::BadFrame)?;
        Ok(Self { bytes, packed_pages: pages.packed as usize })
    }

    /// The runs, ascending.
    pub fn runs(&self) -> impl Iterator<Item = Run> + 'a {
        self.bytes.chunks_exact(RUN_HEADER_BYTES).filter_map(Run::decode)
    }

    /// Length of the packed pages after decoding, without the records of delta runs.
    #[must_use]
    pub fn packed_page_bytes(&self) -> usize {
        self.packed_pages * PAGE_SIZE
    }
}

fn check_lengths(header: &FrameHeader, pages: Pages) -> Result<(), String> {
    let (payload, packed) = (u64::from(header.payload_bytes), u64::from(header.packed_bytes));
    let needed = pages.raw * PAGE_SIZE as u64 + packed;
    let content = pages.raw + pages.packed + pages.delta;
    if payload != needed {
        return Err(format!("{payload} bytes of payload for runs that need {needed}"));
    }
    if pages.all > MAX_FRAME_PAGES || content > MAX_FRAME_CONTENT_PAGES {
        return Err(format!(
            "{} pages, {content} of them with content; at most {MAX_FRAME_PAGES} and \
            {MAX_FRAME_CONTENT_PAGES} are allowed",
            pages.all
        ));
    }
    if (pages.delta == 0) != (header.delta_bytes == 0) {
        return Err(format!("{} bytes of deltas for {} pages", header.delta_bytes, pages.delta));
    }
    match header.algorithm {
        None if pages.packed > 0 => Err("packed pages without an algorithm".into()),
        None if header.packed_bytes != header.delta_bytes => Err(format!(
            "{packed} bytes for {} bytes of deltas that are not compressed",
            header.delta_bytes
        )),
        Some(algorithm) if (pages.packed + pages.delta == 0) != (packed == 0) => {
            Err(format!("{packed} bytes of {algorithm} for {} pages", pages.packed + pages.delta))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::algorithm::Algorithm;
    use crate::frame::FrameKind;

    fn table(runs: &[Run]) -> Vec<u8> {
        let mut bytes = Vec::new();
        runs.iter().for_each(|run| run.encode(&mut bytes));
        bytes
    }

    fn header(table: &[u8], payload_bytes: u32) -> FrameHeader {
        FrameHeader {
            kind: FrameKind::Pages,
            algorithm: None,
            slot: SlotId(3),
            round: 2,
            runs: (table.len() / RUN_HEADER_BYTES) as u32,
            sequence: 9,
            payload_bytes,
            packed_bytes: 0,
            delta_bytes: 0,
            table_checksum: table_checksum(table),
        }
    }

    fn run(first: u64, pages: u32, encoding: Encoding) -> Run {
        Run { first, pages, encoding, content_sum: 0x0102_0304_0506_0708 }
    }

    #[test]
    fn golden_bytes() {
        let table = table(&[run(5, 2, Encoding::Raw), run(9, 1, Encoding::Delta)]);
        let hex = table.iter().map(|b| format!("{b:02x}")).collect::<String>();
        assert_eq!(
            hex,
            "050000000000000002000000010000000807060504030201\
             090000000000000001000000030000000807060504030201"
        );
    }

    #[test]
    fn parse_refuses_invalid_tables() {
        let raw = |first, pages| run(first, pages, Encoding::Raw);
        let packed = |pages| run(0, pages, Encoding::Packed);
        let delta = run(7, 1, Encoding::Delta);
        let plain = |header| header;
        let zstd = |header| FrameHeader { algorithm: Some(Algorithm::Zstd), ..header };
        let with = |packed_bytes, delta_bytes| {
            move |header| FrameHeader { packed_bytes, delta_bytes, ..zstd(header) }
        };
        type Change = Box<dyn Fn(FrameHeader) -> FrameHeader>;
        let cases: Vec<(Vec<Run>, u32, Change, &str)> = vec![
            (
                vec![raw(99, 2)],
                8192,
                Box::new(plain),
                "2 pages from page 99 of slot 3, which has 100",
            ),
            (vec![raw(u64::MAX, 2)], 8192, Box::new(plain), "which has 100"),
            (vec![raw(1, 0)], 0, Box::new(plain), "0 pages from page 1"),
            (vec![raw(5, 2), raw(6, 1)], 12288, Box::new(plain), "page 6 is out of order"),
            (
                vec![raw(5, 2)],
                4096,
                Box::new(plain),
                "4096 bytes of payload for runs that need 8192",
            ),
            (vec![packed(2)], 9, Box::new(with(10, 0)), "9 bytes of payload for runs that need 10"),
            (vec![packed(2)], 0, Box::new(zstd), "0 bytes of zstd for 2 pages"),
            (vec![raw(1, 1)], 4097, Box::new(with(1, 0)), "1 bytes of zstd for 0 pages"),
            (vec![packed(2)], 0, Box::new(plain), "packed pages without an algorithm"),
            (vec![delta], 7, Box::new(with(7, 0)), "0 bytes of deltas for 1 pages"),
            (vec![packed(1)], 7, Box::new(with(7, 3)), "3 bytes of deltas for 0 pages"),
            (
                vec![delta],
                9,
                Box::new(|header| FrameHeader { packed_bytes: 9, delta_bytes: 8, ..header }),
                "9 bytes for 8 bytes of deltas that are not compressed",
            ),
        ];
        for (runs, payload, change, expected) in cases {
            let table = table(&runs);
            let header = change(header(&table, payload));
            let error = RunTable::parse(&header, &table, 100).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
    }

    #[test]
    fn parse_limits_the_decoded_size() {
        let table = table(&[run(0, 129, Encoding::Packed)]);
        let header =
            FrameHeader { algorithm: Some(Algorithm::Lz4), packed_bytes: 10, ..header(&table, 10) };
        let error = RunTable::parse(&header, &table, 1000).unwrap_err();
        assert!(error.to_string().contains("129 of them with content"), "{error}");
    }

    #[test]
    fn parse_refuses_unknown_encodings_and_damaged_tables() {
        let good = table(&[run(5, 2, Encoding::Raw)]);
        let mut unknown = good.clone();
        unknown[12] = 7;
        let error = RunTable::parse(&header(&unknown, 8192), &unknown, 100).unwrap_err();
        assert!(error.to_string().contains("unknown encoding 7"), "{error}");
        let error = RunTable::parse(&header(&good, 8192), &unknown, 100).unwrap_err();
        assert!(matches!(error, WireError::Checksum { what: "a run table", .. }));
    }

    proptest! {
        #[test]
        fn tables_round_trip(
            parts in prop::collection::vec((0_u64..50, 1_u32..5, 0_u8..4), 1..30),
        ) {
            let (mut runs, mut at, mut pages) = (Vec::new(), 0, Pages::default());
            for (gap, count, encoding) in parts {
                let (encoding, sum) = match encoding {
                    0 => (Encoding::Zero, &mut pages.all),
                    1 => (Encoding::Raw, &mut pages.raw),
                    2 => (Encoding::Packed, &mut pages.packed),
                    _ => (Encoding::Delta, &mut pages.delta),
                };
                *sum += u64::from(count);
                runs.push(run(at + gap, count, encoding));
                at += gap + u64::from(count);
            }
            prop_assume!(pages.raw + pages.packed + pages.delta <= MAX_FRAME_CONTENT_PAGES);
            let table = table(&runs);
            let packed = u32::from(pages.packed + pages.delta > 0) * 100;
            let header = FrameHeader {
                algorithm: Some(Algorithm::Zlib),
                packed_bytes: packed,
                delta_bytes: u32::from(pages.delta > 0) * 50,
                ..header(&table, pages.raw as u32 * 4096 + packed)
            };
            let parsed = RunTable::parse(&header, &table, at).unwrap();
            prop_assert_eq!(parsed.runs().collect::<Vec<_>>(), runs);
            prop_assert_eq!(parsed.packed_page_bytes(), pages.packed as usize * PAGE_SIZE);
            prop_assert!(RunTable::parse(&header, &table, at - 1).is_err());
        }

        #[test]
        fn any_bytes_never_panic(
            bytes in prop::collection::vec(any::<u8>(), 48), slot_pages in any::<u64>(),
            payload in any::<u32>(), packed_bytes in any::<u32>(), delta_bytes in any::<u32>()
        ) {
            let header = FrameHeader { packed_bytes, delta_bytes, ..header(&bytes, payload) };
            let _ = RunTable::parse(&header, &bytes, slot_pages);
        }
    }
}
