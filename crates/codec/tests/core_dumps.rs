//! Copies of guest data are excluded from core dumps. A child that holds some crashes, and its dump
//! is searched.

#[path = "../../memory/tests/dumps/mod.rs"]
mod dumps;

use std::sync::Arc;

use dumps::{PAGES, PATTERN, fill, hold, is_kept_out, order};
use vmferry_codec::{
    Choice, Compressors, Decompressors, DeltaUse, EncodedFrame, Frame, HotPages, PageMark,
    PageVersion, Piece, StreamDecoder, StreamEncoder,
};
use vmferry_memory::{GuestBytes, PAGE_SIZE, SlotId};

#[test]
fn hot_pages_are_in_no_core_dump() {
    is_kept_out("hot");
}

#[test]
fn unsent_frames_are_in_no_core_dump() {
    is_kept_out("frame");
}

#[test]
fn kept_pages_are_in_no_core_dump() {
    is_kept_out("kept");
}

/// Not a test of its own: it runs as the child that the tests above crash.
#[test]
fn child_process_of_the_test() {
    let Some((kind, undone)) = order() else { return };
    if kind == "kept" {
        let _kept = kept();
        hold(undone);
    }
    let (hot, mut frame) = (Arc::new(HotPages::new(4 << 20)), EncodedFrame::new());
    let mut deltas = GuestBytes::new();
    // Each page is generated here before it is kept.
    let mut page = GuestBytes::zeroed(PAGE_SIZE).unwrap();
    for number in 0..PAGES {
        fill(number, &mut page);
        match kind.as_str() {
            "hot" => {
                let version = PageVersion {
                    slot: SlotId(0),
                    page: number,
                    round: 1,
                    sent_hash: None,
                    new_hash: 1,
                    content: &page[..],
                };
                hot.delta(version, &mut deltas, 0);
            }
            "frame" => {
                let pages = frame.pages_mut(PAGES as usize);
                pages[number as usize * PAGE_SIZE..][..PAGE_SIZE].copy_from_slice(&page[..]);
            }
            other => unreachable!("{other}"),
        }
    }
    hold(undone);
}

/// The decoder of a stream that has received each page whole and then changed. All other buffers
/// contain at most the last page.
fn kept() -> StreamDecoder {
    let entries = PAGES as u32 * 4;
    let source = HotPages::new(u64::from(entries) * PAGE_SIZE as u64);
    let mut encoder = StreamEncoder::new(Compressors::default());
    let mut decoder = StreamDecoder::new(Decompressors::default(), entries);
    let (mut sent, mut received, mut wire) = (EncodedFrame::new(), Frame::new(), GuestBytes::new());
    let choice = Choice { pack: None, delta: DeltaUse::Make };
    let (mut offset, mut deltas) = (0, 0);
    for round in 1..=2 {
        for page in 0..PAGES {
            let bytes = sent.bytes_mut(PAGE_SIZE);
            fill(page, bytes);
            bytes[PATTERN] = round as u8;
            let pages = &[PageMark { at: 0, slot: SlotId(0), page }];
            let piece = Piece { offset, bytes: PAGE_SIZE, pages, zero_pages: 0, round };
            sent.divide(piece, &source, choice);
            let (counts, _) = encoder.encode(&mut sent, choice.pack).unwrap();
            deltas += counts.delta_pages;
            offset += PAGE_SIZE as u64;
            sent.set_sequence(offset / PAGE_SIZE as u64);
            wire.clear();
            sent.write_to(&mut wire).unwrap();
            received.read_from(&mut &wire[..]).unwrap().unwrap();
            decoder.decode(&received).unwrap();
        }
    }
    assert_eq!(deltas, PAGES, "each page was kept");
    decoder
}
