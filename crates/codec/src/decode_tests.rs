//! Frames from one side's memory to the other side's.

use std::io;
use std::sync::Arc;

use proptest::prelude::*;
use vmferry_memory::{MemoryKind, PageRun, SlotId, SlotLayout, whole_hash};
use vmferry_wire::{FRAME_HEADER_BYTES, table_checksum};

use super::*;
use crate::compress::Compressors;
use crate::encode::{Batch, Choice, DeltaUse, Encoder, FrameCounts};
use crate::frame::EncodedFrame;
use crate::hot_pages::HotPages;
use crate::method::Method;
use crate::received_frame::ReadError;

const PAGES: u64 = 64;
const STRAY: u64 = 63;
const SLOT: SlotId = SlotId(0);

const RAW: Choice = Choice { pack: None, delta: DeltaUse::Off };
const ZSTD: Choice = Choice { pack: Some(Method::zstd(1)), delta: DeltaUse::Off };
const DELTA: Choice = Choice { pack: None, delta: DeltaUse::Make };

struct Side {
    memory: GuestMemory,
    hashes: PageHashes,
    encoder: Encoder,
}

impl Side {
    fn new() -> Self {
        let layout = [SlotLayout { slot: SLOT, gpa: 0, pages: PAGES }];
        let memory = GuestMemory::allocate(&layout, MemoryKind::Private).unwrap();
        let hot = Arc::new(HotPages::new(PAGES * PAGE_SIZE as u64));
        let hashes = PageHashes::for_memory(&memory);
        Self { hashes, memory, encoder: Encoder::new(Compressors::default(), hot) }
    }

    fn encode(&mut self, sequence: u64, pages: &[u64], choice: Choice) -> (Vec<u8>, FrameCounts) {
        let mut frame = EncodedFrame::new();
        let copy = frame.pages_mut(pages.len());
        for (page, into) in pages.iter().zip(copy.chunks_exact_mut(PAGE_SIZE)) {
            self.memory.copy_out(run(*page), into).unwrap();
        }
        let batch = Batch { round: sequence as u32, slot: SLOT, pages };
        let counts = self.encoder.encode(&mut frame, batch, &self.hashes, choice).unwrap();
        assert_eq!(counts.content_pages() + counts.zero_pages, pages.len() as u64);
        frame.set_sequence(sequence);
        let mut bytes = Vec::new();
        frame.write_to(&mut bytes).unwrap();
        assert_eq!(bytes.len(), frame.wire_bytes());
        (bytes, counts)
    }

    fn place(&self, bytes: &[u8]) -> Result<u64, CodecError> {
        let mut frame = Frame::new();
        match frame.read_from(&mut &bytes[..]) {
            Ok(Some(_)) => Decoder::default()
                .place(&frame, &self.memory, &self.hashes, |run| run.first != STRAY)
                .map(|counts| counts.content + counts.zero),
            Ok(None) => Ok(0),
            Err(ReadError::Wire(error)) => Err(error.into()),
            Err(ReadError::Io(error)) => panic!("{error}"),
        }
    }
}

fn run(page: u64) -> PageRun {
    PageRun { slot: SLOT, first: page, pages: 1 }
}

/// Fills a page with one byte; 0 makes a zero page.
fn fill(memory: &GuestMemory, page: u64, byte: u8) {
    memory.copy_in(run(page), &[byte; PAGE_SIZE]).unwrap();
}

/// A page that is not zero, not random, and different in each version.
fn text(page: u64, version: u64) -> Vec<u8> {
    format!("page {page} in version {version}; ").bytes().cycle().take(PAGE_SIZE).collect()
}

fn random(page: u64, version: u64) -> Vec<u8> {
    let mut state = (page << 32 | version).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..PAGE_SIZE).map(|_| next()).collect()
}

fn choices() -> impl Strategy<Value = Choice> {
    let methods = [None, Some(Method::lz4()), Some(Method::zstd(1)), Some(Method::zlib(1))];
    let uses = [DeltaUse::Off, DeltaUse::Make];
    (prop::sample::select(methods.to_vec()), prop::sample::select(uses.to_vec()))
        .prop_map(|(pack, delta)| Choice { pack, delta })
}

/// A change of a page by the guest before a frame is encoded.
#[derive(Clone, Debug)]
enum Write {
    Zero,
    Text,
    Random,
    Few(u16, u8),
}

fn writes() -> impl Strategy<Value = Write> {
    prop_oneof![
        1 => Just(Write::Zero),
        2 => Just(Write::Text),
        1 => Just(Write::Random),
        3 => (0_u16..4096, any::<u8>()).prop_map(|(at, byte)| Write::Few(at, byte)),
    ]
}

proptest! {
    #[test]
    fn what_is_placed_is_what_was_sent(
        frames in prop::collection::vec(
            (choices(), prop::collection::vec((0..STRAY - 1, writes()), 1..20)), 1..20)
    ) {
        let (mut source, destination) = (Side::new(), Side::new());
        for (sequence, (choice, writes)) in (1..).zip(frames) {
            for (page, write) in &writes {
                let (memory, page) = (&source.memory, *page);
                match write {
                    Write::Zero => fill(memory, page, 0),
                    Write::Text => memory.copy_in(run(page), &text(page, sequence)).unwrap(),
                    Write::Random => memory.copy_in(run(page), &random(page, sequence)).unwrap(),
                    Write::Few(at, byte) => {
                        let at = page * PAGE_SIZE as u64 + u64::from(*at);
                        memory.write_at(at, &[*byte]).unwrap();
                    }
                }
            }
            let mut pages: Vec<u64> = writes.iter().map(|(page, _)| *page).collect();
            pages.sort_unstable();
            pages.dedup();
            let (bytes, _) = source.encode(sequence, &pages, choice);
            prop_assert_eq!(destination.place(&bytes).unwrap(), pages.len() as u64);
        }
        prop_assert_eq!(source.hashes.sum(), destination.hashes.sum());
        prop_assert_eq!(
            whole_hash(&source.memory).unwrap(),
            whole_hash(&destination.memory).unwrap()
        );
    }
}

#[test]
fn a_page_of_zeros_populates_nothing_unless_it_must() {
    let (mut source, destination) = (Side::new(), Side::new());
    destination.place(&source.encode(1, &[3, 4, 5], ZSTD).0).unwrap();
    assert!(destination.memory.populated().unwrap().is_empty());
    fill(&source.memory, 4, 1);
    destination.place(&source.encode(2, &[3, 4, 5], ZSTD).0).unwrap();
    fill(&source.memory, 4, 0);
    destination.place(&source.encode(3, &[4], ZSTD).0).unwrap();
    assert_eq!(whole_hash(&destination.memory).unwrap().pages, 0);
    assert_eq!(source.hashes.sum(), destination.hashes.sum());
}

#[test]
fn scattered_pages_are_packed_together_and_random_ones_go_raw() {
    let (mut source, destination) = (Side::new(), Side::new());
    let pages: Vec<u64> = (0..60).step_by(3).collect();
    for page in &pages {
        let content = if page % 2 == 0 { text(*page, 1) } else { random(*page, 1) };
        source.memory.copy_in(run(*page), &content).unwrap();
    }
    let (bytes, counts) = source.encode(1, &pages, ZSTD);
    assert_eq!((counts.packed_pages, counts.raw_pages, counts.random_pages), (10, 10, 10));
    assert!(counts.packed_bytes < 1000, "ten pages of similar text: {counts:?}");
    assert_eq!(destination.place(&bytes).unwrap(), 20);
    assert_eq!(whole_hash(&source.memory).unwrap(), whole_hash(&destination.memory).unwrap());
}

#[test]
fn only_changes_travel_of_a_page_that_is_held() {
    let (mut source, destination) = (Side::new(), Side::new());
    let pages: Vec<u64> = (0..8).collect();
    for page in &pages {
        source.memory.copy_in(run(*page), &random(*page, 1)).unwrap();
    }
    // Sent in the first round, kept in the second, a delta from the third on.
    for (sequence, deltas) in [(1, 0), (2, 0), (3, 8), (4, 8)] {
        for page in &pages {
            let at = page * PAGE_SIZE as u64 + 77 * sequence;
            source.memory.write_at(at, &sequence.to_le_bytes()).unwrap();
        }
        let (bytes, counts) = source.encode(sequence, &pages, DELTA);
        assert_eq!(counts.delta_pages, deltas, "{counts:?}");
        assert!(deltas == 0 || bytes.len() < 8 * 20 + 100, "{} bytes", bytes.len());
        destination.place(&bytes).unwrap();
    }
    assert_eq!(whole_hash(&source.memory).unwrap(), whole_hash(&destination.memory).unwrap());
}

/// A source and a destination that both have pages 0 to 2, and a frame with a delta of page 1.
fn with_a_delta() -> (Side, Side, Vec<u8>) {
    let (mut source, destination) = (Side::new(), Side::new());
    for sequence in 1..4 {
        for page in 0..3 {
            source.memory.copy_in(run(page), &text(page, 1)).unwrap();
        }
        source.memory.write_at(PAGE_SIZE as u64 + 9, &[sequence as u8]).unwrap();
        let (bytes, counts) = source.encode(sequence, &[0, 1, 2], DELTA);
        if sequence == 3 {
            assert_eq!(counts.delta_pages, 3);
            return (source, destination, bytes);
        }
        destination.place(&bytes).unwrap();
    }
    unreachable!("the third frame is the last one")
}

#[test]
fn changes_of_another_page_are_refused() {
    let (_source, destination, bytes) = with_a_delta();
    // A destination that has received different content.
    let mut other = Side::new();
    fill(&other.memory, 2, 9);
    destination.place(&other.encode(1, &[2], RAW).0).unwrap();
    let before = whole_hash(&destination.memory).unwrap();
    let error = destination.place(&bytes).unwrap_err();
    assert!(
        matches!(error, CodecError::DeltaBase { slot: SLOT, page: 0, pages: 3, sequence: 3, .. }),
        "{error}"
    );
    assert_eq!(whole_hash(&destination.memory).unwrap(), before);
}

#[test]
fn changes_of_a_page_that_never_came_are_refused() {
    let (_source, _destination, bytes) = with_a_delta();
    let error = Side::new().place(&bytes).unwrap_err();
    assert!(error.to_string().contains("that are not here"), "{error}");
}

#[test]
fn a_delta_that_comes_twice_is_not_applied_twice() {
    let (_source, destination, bytes) = with_a_delta();
    destination.place(&bytes).unwrap();
    let before = whole_hash(&destination.memory).unwrap();
    assert!(matches!(destination.place(&bytes), Err(CodecError::DeltaBase { .. })));
    assert_eq!(whole_hash(&destination.memory).unwrap(), before);
}

/// Changes the header and recomputes the checksums of header and table.
fn reseal(bytes: &mut [u8], change: impl FnOnce(&mut FrameHeader)) {
    let (head, rest) = bytes.split_first_chunk_mut::<FRAME_HEADER_BYTES>().unwrap();
    let mut header = FrameHeader::parse(head).unwrap();
    change(&mut header);
    header.table_checksum = table_checksum(&rest[..header.table_bytes()]);
    *head = header.encode();
}

#[test]
fn packed_bytes_that_decode_to_something_else_are_refused() {
    for method in [Method::zlib(1), Method::zstd(1), Method::lz4()] {
        let mut source = Side::new();
        for page in 0..5 {
            source.memory.copy_in(run(page), &text(page, 1)).unwrap();
        }
        let choice = Choice { pack: Some(method), delta: DeltaUse::Off };
        let (good, _) = source.encode(1, &[0, 1, 2, 3, 4], choice);
        let entry = FRAME_HEADER_BYTES;
        let fewer = |bytes: &mut Vec<u8>| bytes[entry + 8] = 4;
        let more = |bytes: &mut Vec<u8>| bytes[entry + 8] = 6;
        let cut = |bytes: &mut Vec<u8>| {
            bytes.pop();
        };
        for (what, change) in
            [("fewer", &fewer as &dyn Fn(&mut Vec<u8>)), ("more", &more), ("cut", &cut)]
        {
            let mut bad = good.clone();
            change(&mut bad);
            let lost = (good.len() - bad.len()) as u32;
            reseal(&mut bad, |header| {
                header.packed_bytes -= lost;
                header.payload_bytes -= lost;
            });
            let destination = Side::new();
            let error = destination.place(&bad).unwrap_err();
            assert!(
                matches!(error, CodecError::Unpack { slot: SLOT, page: 0, sequence: 1, .. }),
                "{method}, {what}: {error}"
            );
            assert!(destination.memory.populated().unwrap().is_empty());
        }
    }
}

#[test]
fn content_that_differs_is_named_by_slot_and_page() {
    let mut source = Side::new();
    fill(&source.memory, 7, 1);
    let (mut bytes, _) = source.encode(3, &[7], RAW);
    *bytes.last_mut().unwrap() ^= 1;
    let error = Side::new().place(&bytes).unwrap_err();
    assert!(
        error.to_string().starts_with("frame 3: 1 pages from page 7 of slot 0 hash to"),
        "{error}"
    );
}

#[test]
fn a_damaged_frame_places_nothing() {
    for pack in [None, Some(Method::lz4()), Some(Method::zstd(1)), Some(Method::zlib(1))] {
        let mut source = Side::new();
        for page in 0..3 {
            source.memory.copy_in(run(page), &text(page, 1)).unwrap();
        }
        let choice = Choice { pack, delta: DeltaUse::Off };
        let (good, _) = source.encode(1, &[0, 1, 2, 9], choice);
        let header = FrameHeader::parse(good.first_chunk().unwrap()).unwrap();
        let packed_at = good.len() - header.packed_bytes as usize;
        let whole = whole_hash(&source.memory).unwrap();
        let mut destination = Side::new();
        // For frames that are not packed, a sample of the bits; for packed ones, every bit.
        for bit in (0..good.len() * 8).step_by(if pack.is_none() { 101 } else { 1 }) {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            if destination.place(&bad).is_err() {
                assert_eq!(destination.hashes.sum(), 0, "bit {bit}");
                continue;
            }
            // The bit may be part of a match distance and refer to another copy of the same bytes.
            assert!(bit / 8 >= packed_at, "bit {bit}");
            assert_eq!(whole_hash(&destination.memory).unwrap(), whole, "bit {bit}");
            destination = Side::new();
        }
        assert!(destination.memory.populated().unwrap().is_empty());
    }
}

#[test]
fn a_damaged_delta_changes_nothing() {
    let (_source, destination, good) = with_a_delta();
    let before = whole_hash(&destination.memory).unwrap();
    for bit in 0..good.len() * 8 {
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(destination.place(&bad).is_err(), "bit {bit}");
        // Also if a malicious source recomputes the checksums of header and table.
        if bit / 8 >= FRAME_HEADER_BYTES {
            reseal(&mut bad, |_| {});
            assert!(destination.place(&bad).is_err(), "bit {bit}, sealed again");
        }
    }
    assert_eq!(whole_hash(&destination.memory).unwrap(), before);
    destination.place(&good).unwrap();
}

#[test]
fn a_cut_frame_is_an_error_and_the_end_between_frames_is_not() {
    let mut source = Side::new();
    fill(&source.memory, 1, 7);
    let (good, _) = source.encode(1, &[1], RAW);
    for length in [1, 43, 44, 60, 68, good.len() - 1] {
        let error = Frame::new().read_from(&mut &good[..length]).unwrap_err();
        assert!(matches!(error, ReadError::Io(e) if e.kind() == io::ErrorKind::UnexpectedEof));
    }
    assert!(Frame::new().read_from(&mut &[][..]).unwrap().is_none());
}

#[test]
fn a_slot_that_is_not_there_is_an_error() {
    let mut side = Side::new();
    let mut frame = EncodedFrame::new();
    frame.pages_mut(1).fill(1);
    let batch = Batch { round: 1, slot: SlotId(7), pages: &[0] };
    side.encoder.encode(&mut frame, batch, &side.hashes, RAW).unwrap();
    frame.set_sequence(1);
    let mut bytes = Vec::new();
    frame.write_to(&mut bytes).unwrap();
    let error = side.place(&bytes).unwrap_err();
    let expected = CodecError::NoSuchSlot { sequence: 1, slot: SlotId(7), slots: 1 };
    assert_eq!(error.to_string(), expected.to_string());
}

#[test]
fn a_page_of_another_lane_is_an_error_and_places_nothing() {
    let (mut source, destination) = (Side::new(), Side::new());
    fill(&source.memory, 1, 7);
    let error = destination.place(&source.encode(1, &[1, STRAY], RAW).0).unwrap_err();
    assert!(matches!(error, CodecError::Stray { page: STRAY, .. }), "{error}");
    assert!(destination.memory.populated().unwrap().is_empty());
}

#[test]
fn the_end_of_a_round_places_nothing() {
    let side = Side::new();
    let mut frame = EncodedFrame::new();
    frame.end_of_round(4);
    frame.set_sequence(8);
    let mut bytes = Vec::new();
    frame.write_to(&mut bytes).unwrap();
    let mut received = Frame::new();
    let header = received.read_from(&mut &bytes[..]).unwrap().unwrap();
    assert_eq!((header.kind, header.round, header.sequence), (FrameKind::EndOfRound, 4, 8));
    assert_eq!(side.place(&bytes).unwrap(), 0);
}
