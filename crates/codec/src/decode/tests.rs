//! Frames from one side's memory to the other side's.

use std::sync::Arc;

use proptest::prelude::*;
use vmferry_memory::{MemoryKind, PageRun, SlotId, SlotLayout, whole_hash};

use super::*;
use crate::compress::Compressors;
use crate::encode::{Batch, Choice, DeltaUse, Encoder, FrameCounts};
use crate::frame::EncodedFrame;
use crate::hot_pages::HotPages;
use crate::method::Method;
use crate::received_frame::ReadError;
use crate::samples::noise_page;

mod refused;

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

/// A page of random bytes, different in each version.
fn random(page: u64, version: u64) -> Vec<u8> {
    noise_page(page << 32 | version)
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
    fn place_reproduces_the_pages_that_were_encoded(
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
fn zero_page_populates_nothing_and_overwrites_earlier_content() {
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
fn encode_packs_scattered_pages_together_and_sends_random_pages_raw() {
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
fn encode_sends_deltas_of_pages_that_are_held() {
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

#[test]
fn end_of_round_places_nothing() {
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
