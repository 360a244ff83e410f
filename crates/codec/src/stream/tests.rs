//! Pieces encoded and decoded.

use std::io::Read;
use std::sync::Arc;

use proptest::prelude::*;
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, SlotId, SlotLayout};

use super::*;
use crate::samples::{methods, noise_page, text};
use crate::{
    Batch, Choice, CodecError, Compressors, Decoder, Decompressors, DeltaUse, EncodedFrame,
    Encoder, Frame, FrameCounts, HotPages, Method, PageHashes,
};

const ENTRIES: u32 = 64;

/// Both ends of a stream.
struct Ends {
    kept: HotPages,
    encoder: StreamEncoder,
    decoder: StreamDecoder,
    offset: u64,
    sequence: u64,
}

impl Ends {
    fn new() -> Self {
        Self {
            kept: HotPages::new(u64::from(ENTRIES) * PAGE_SIZE as u64),
            encoder: StreamEncoder::new(Compressors::default()),
            decoder: StreamDecoder::new(Decompressors::default(), ENTRIES),
            offset: 0,
            sequence: 0,
        }
    }

    fn encode(
        &mut self,
        bytes: &[u8],
        pages: &[PageMark],
        round: u32,
        choice: Choice,
    ) -> (Vec<u8>, FrameCounts) {
        let mut frame = EncodedFrame::new();
        frame.bytes_mut(bytes.len()).copy_from_slice(bytes);
        let (offset, zero_pages) = (self.offset, 0);
        let piece = Piece { offset, bytes: bytes.len(), pages, zero_pages, round };
        frame.divide(piece, &self.kept, choice);
        let (counts, _) = self.encoder.encode(&mut frame, choice.pack).unwrap();
        self.offset += bytes.len() as u64;
        self.sequence += 1;
        frame.set_sequence(self.sequence);
        let mut wire = Vec::new();
        frame.write_to(&mut wire).unwrap();
        assert_eq!(wire.len(), frame.wire_bytes());
        (wire, counts)
    }

    fn decode(&mut self, wire: &[u8]) -> Result<Vec<u8>, CodecError> {
        let mut frame = Frame::new();
        frame.read_from(&mut wire.chain(std::io::empty())).unwrap().unwrap();
        Ok(self.decoder.decode(&frame)?.bytes.to_vec())
    }

    fn both(
        &mut self,
        bytes: &[u8],
        pages: &[PageMark],
        round: u32,
        choice: Choice,
    ) -> (usize, FrameCounts) {
        let (wire, counts) = self.encode(bytes, pages, round, choice);
        assert!(self.decode(&wire).unwrap() == bytes, "the same bytes");
        (wire.len(), counts)
    }
}

/// Records of one page each: eight bytes and the page.
fn records(first: u64, pages: &[Vec<u8>]) -> (Vec<u8>, Vec<PageMark>) {
    let (mut bytes, mut marks) = (Vec::new(), Vec::new());
    for (page, content) in (first..).zip(pages) {
        bytes.extend_from_slice(&(page << 12 | 0x28).to_be_bytes());
        marks.push(PageMark { at: bytes.len(), slot: SlotId(0), page });
        bytes.extend_from_slice(content);
    }
    (bytes, marks)
}

const WITH_DELTAS: Choice = Choice { pack: None, delta: DeltaUse::Make };

#[test]
fn kept_pages_are_sent_as_deltas() {
    let mut ends = Ends::new();
    let mut pages: Vec<Vec<u8>> = (1..=8).map(noise_page).collect();
    let (bytes, marks) = records(100, &pages);
    let (first, counts) = ends.both(&bytes, &marks, 2, WITH_DELTAS);
    assert_eq!((counts.raw_pages, counts.unheld_pages, counts.delta_pages), (8, 8, 0));
    assert!(first > 8 * PAGE_SIZE);
    for round in 3..6 {
        pages.iter_mut().for_each(|page| page[round as usize] ^= 0x55);
        let (bytes, marks) = records(100, &pages);
        let (again, counts) = ends.both(&bytes, &marks, round, WITH_DELTAS);
        assert_eq!((counts.raw_pages, counts.delta_pages), (0, 8));
        assert!(again < 400, "{again}");
    }
    // A page that has changed too much is kept again, and is the base of the next delta.
    pages[3] = noise_page(99);
    let (bytes, marks) = records(100, &pages);
    let (_, counts) = ends.both(&bytes, &marks, 6, WITH_DELTAS);
    assert_eq!((counts.raw_pages, counts.delta_pages), (1, 7));
    let (_, counts) = ends.both(&bytes, &marks, 7, WITH_DELTAS);
    assert_eq!(counts.delta_pages, 8);
}

#[test]
fn random_content_is_not_packed() {
    let mut ends = Ends::new();
    let pages = [noise_page(1), text(PAGE_SIZE), noise_page(2), text(PAGE_SIZE)];
    let (bytes, marks) = records(0, &pages);
    for method in methods() {
        let choice = Choice { pack: Some(method), delta: DeltaUse::Off };
        let (wire, counts) = ends.both(&bytes, &marks, 1, choice);
        assert_eq!((counts.random_pages, counts.packed_pages), (2, 2), "{method}");
        assert!(wire < 3 * PAGE_SIZE + PAGE_SIZE / 2, "{method}: {wire}");
    }
}

#[test]
fn content_that_does_not_shrink_is_sent_raw() {
    let mut ends = Ends::new();
    // The pages are not marked, so the test for random pages is not applied.
    let bytes = [noise_page(3), noise_page(4)].concat();
    let choice = Choice { pack: Some(Method::lz4()), delta: DeltaUse::Off };
    let (wire, counts) = ends.both(&bytes, &[], 1, choice);
    assert!(wire < bytes.len() + 100);
    assert_eq!(counts.content_pages(), 0);
}

#[test]
fn damaged_piece_is_an_error() {
    let pages = [noise_page(1), text(PAGE_SIZE), text(PAGE_SIZE)];
    let (bytes, marks) = records(7, &pages);
    let choice = Choice { pack: Some(Method::zstd(1)), delta: DeltaUse::Make };
    let (good, _) = Ends::new().encode(&bytes, &marks, 2, choice);
    assert!(Ends::new().decode(&good).is_ok());
    let (mut tried, mut refused) = (0, 0);
    // After the header, which has its own checksum.
    for at in (vmferry_wire::FRAME_HEADER_BYTES..good.len()).step_by(7) {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        // Some bits of a compressed format have no effect.
        match Ends::new().decode(&bad) {
            Err(_) => refused += 1,
            Ok(decoded) => assert!(decoded == bytes, "byte {at}"),
        }
        tried += 1;
    }
    assert!(refused * 100 > tried * 99, "{refused} of {tried}");
    // The correct bytes at the wrong offset are an error.
    let mut ends = Ends::new();
    ends.decode(&good).unwrap();
    assert!(matches!(ends.decode(&good), Err(CodecError::PieceHash { .. })));
    // A delta against a page that was never kept.
    let mut ahead = Ends::new();
    ahead.encode(&bytes, &marks, 2, WITH_DELTAS);
    ahead.offset = 0;
    let (delta, counts) = ahead.encode(&bytes, &marks, 3, WITH_DELTAS);
    assert_eq!(counts.delta_pages, 3);
    assert!(matches!(Ends::new().decode(&delta), Err(CodecError::NotKept { entry: _, .. })));
}

#[test]
fn pages_and_pieces_refuse_each_others_frames() {
    let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: 64 }];
    let memory = GuestMemory::allocate(&layout, MemoryKind::Private).unwrap();
    let hashes = PageHashes::for_memory(&memory);
    let read = |wire: &[u8]| {
        let mut frame = Frame::new();
        frame.read_from(&mut &wire[..]).unwrap().unwrap();
        frame
    };
    let mut ends = Ends::new();
    let (piece, _) = ends.encode(&noise_page(1), &[], 1, Choice::default());
    let placed =
        Decoder::new(Decompressors::default()).place(&read(&piece), &memory, &hashes, |_| true);
    assert!(placed.unwrap_err().to_string().contains("where pages are due"));
    assert!(!hashes.knows(SlotId(0), 0));

    let mut frame = EncodedFrame::new();
    frame.pages_mut(1).fill(7);
    let mut encoder = Encoder::new(Compressors::default(), Arc::new(HotPages::new(0)));
    let batch = Batch { round: 1, slot: SlotId(0), pages: &[3] };
    encoder.encode(&mut frame, batch, &hashes, Choice::default()).unwrap();
    let mut pages = Vec::new();
    frame.write_to(&mut pages).unwrap();
    let refused = ends.decode(&pages).unwrap_err().to_string();
    assert!(refused.contains("a piece of a stream is due"), "{refused}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// The bytes arrive unchanged for any marks.
    #[test]
    fn stream_round_trips_any_bytes_and_marks(
        pieces in proptest::collection::vec(
            (
                proptest::collection::vec(any::<u8>(), 1..9000),
                proptest::collection::vec((0_usize..9000, 0_u64..100), 0..5),
                0_usize..4,
            ),
            1..12,
        ),
    ) {
        let mut ends = Ends::new();
        for (round, (mut bytes, marks, way)) in (1..).zip(pieces) {
            // Half of it is uniform, so that it can be packed.
            let half = bytes.len() / 2;
            bytes[..half].fill(round as u8);
            let marks: Vec<PageMark> = marks
                .into_iter()
                .map(|(at, page)| PageMark { at, slot: SlotId(0), page })
                .collect();
            let zstd = Method::zstd(1);
            let pack = [None, Some(Method::lz4()), Some(zstd), Some(Method::zlib(1))][way];
            let delta = if way % 2 == 0 { DeltaUse::Make } else { DeltaUse::Off };
            let (wire, _) = ends.encode(&bytes, &marks, round, Choice { pack, delta });
            prop_assert!(ends.decode(&wire).unwrap() == bytes);
        }
    }
}
