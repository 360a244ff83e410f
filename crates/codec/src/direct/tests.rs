//! Pages received in place are the same as pages placed from a whole frame.

use std::sync::Arc;

use vmferry_memory::{MemoryKind, SlotId, SlotLayout, whole_hash};
use vmferry_wire::FRAME_HEADER_BYTES;

use super::*;
use crate::hashes::SumChange;
use crate::{Batch, Choice, Compressors, EncodedFrame, Encoder, HotPages};

const SLOT: SlotId = SlotId(0);
const PAGES: u64 = 128;
const STRAY: u64 = 127;

fn memory() -> GuestMemory {
    let layout = [SlotLayout { slot: SLOT, gpa: 0, pages: PAGES }];
    GuestMemory::allocate(&layout, MemoryKind::Private).unwrap()
}

/// A guest whose even pages have content. The content of every second one also fills the next page.
fn source() -> GuestMemory {
    let memory = memory();
    for page in (0..PAGES).step_by(2) {
        let content = [page as u8 + 1; 2 * PAGE_SIZE];
        let pages = 1 + page / 2 % 2;
        let run = PageRun { slot: SLOT, first: page, pages };
        memory.copy_in(run, &content[..pages as usize * PAGE_SIZE]).unwrap();
    }
    memory
}

fn encode(memory: &GuestMemory, pages: &[u64], hashes: &PageHashes) -> Vec<u8> {
    let mut frame = EncodedFrame::new();
    let copy = frame.pages_mut(pages.len());
    for (page, into) in pages.iter().zip(copy.chunks_exact_mut(PAGE_SIZE)) {
        memory.copy_out(PageRun { slot: SLOT, first: *page, pages: 1 }, into).unwrap();
    }
    let mut encoder = Encoder::new(Compressors::default(), Arc::new(HotPages::new(0)));
    let batch = Batch { round: 1, slot: SLOT, pages };
    encoder.encode(&mut frame, batch, hashes, Choice::default()).unwrap();
    let mut bytes = Vec::new();
    frame.write_to(&mut bytes).unwrap();
    bytes
}

/// Receives a frame whose payload comes in pieces of `piece` bytes.
fn receive(
    bytes: &[u8],
    memory: &GuestMemory,
    hashes: &PageHashes,
    piece: usize,
) -> Result<PlacedPages, CodecError> {
    let (mut decoder, mut frame) = (Decoder::default(), Frame::new());
    let mut rest = bytes;
    let header = frame.read_head(&mut rest).unwrap().unwrap();
    assert!(is_direct(&header));
    let mut sink = decoder.begin_direct(&frame, memory, hashes, |run| run.first != STRAY)?;
    assert_eq!(sink.left_bytes(), rest.len());
    for piece in rest.chunks(piece) {
        assert_eq!(sink.put(piece), piece.len());
    }
    decoder.finish_direct(&frame, memory, hashes)
}

#[test]
fn direct_frame_places_pages_and_zeros() {
    let (from, to) = (source(), memory());
    let hashes = [&from, &to].map(PageHashes::for_memory);
    let pages: Vec<u64> = (0..PAGES).collect();
    for (piece, pages) in [4096, 1000, 1 << 20].into_iter().zip(pages.chunks(50)) {
        // Previous content is overwritten if it was recorded, also by zero pages.
        to.copy_in(PageRun { slot: SLOT, first: pages[1], pages: 1 }, &[9; PAGE_SIZE]).unwrap();
        let mut change = SumChange::default();
        hashes[1].replace(SLOT, pages[1], 1, &mut change);
        hashes[1].add(change);
        let bytes = encode(&from, pages, &hashes[0]);
        let placed = receive(&bytes, &to, &hashes[1], piece).unwrap();
        assert_eq!(placed.content + placed.zero, pages.len() as u64);
        assert!(placed.zero > 0);
    }
    assert_eq!(hashes[0].sum(), hashes[1].sum());
    assert_eq!(whole_hash(&from).unwrap(), whole_hash(&to).unwrap());
}

#[test]
fn direct_frame_is_placed_when_sent_again_after_a_part() {
    let (from, to) = (source(), memory());
    let hashes = [&from, &to].map(PageHashes::for_memory);
    let pages: Vec<u64> = (0..PAGES).collect();
    let bytes = encode(&from, &pages, &hashes[0]);
    let (mut decoder, mut frame) = (Decoder::default(), Frame::new());
    let mut rest = &bytes[..];
    frame.read_head(&mut rest).unwrap();
    let mut sink = decoder.begin_direct(&frame, &to, &hashes[1], |_| true).unwrap();
    sink.put(&rest[..rest.len() / 2]);
    assert_eq!(hashes[1].sum(), 0, "nothing counts as placed");
    receive(&bytes, &to, &hashes[1], 8192).unwrap();
    assert_eq!(hashes[0].sum(), hashes[1].sum());
    assert_eq!(whole_hash(&from).unwrap(), whole_hash(&to).unwrap());
}

#[test]
fn damaged_direct_frame_is_detected_and_not_recorded() {
    let (from, to) = (source(), memory());
    let hashes = [&from, &to].map(PageHashes::for_memory);
    let good = encode(&from, &[0, 1, 2, 3, 4, 6], &hashes[0]);
    let head = good.len() - 5 * PAGE_SIZE;
    for at in (head..good.len()).step_by(999) {
        let mut bad = good.clone();
        bad[at] ^= 4;
        let error = receive(&bad, &to, &hashes[1], 4096).unwrap_err();
        assert!(matches!(error, CodecError::ContentSum { .. }), "{at}: {error}");
        assert_eq!(hashes[1].sum(), 0);
    }
}

#[test]
fn direct_frame_with_an_invalid_head_writes_nothing() {
    let (from, to) = (source(), memory());
    let hashes = [&from, &to].map(PageHashes::for_memory);
    let mut damaged = encode(&from, &[4, 5, 6], &hashes[0]);
    damaged[FRAME_HEADER_BYTES] ^= 1;
    let error = receive(&damaged, &to, &hashes[1], 4096).unwrap_err();
    assert!(matches!(error, CodecError::Wire(_)), "{error}");
    let stray = encode(&from, &[STRAY], &hashes[0]);
    let error = receive(&stray, &to, &hashes[1], 4096).unwrap_err();
    assert!(matches!(error, CodecError::Stray { page: STRAY, .. }), "{error}");
    assert_eq!(whole_hash(&to).unwrap().pages, 0);
}
