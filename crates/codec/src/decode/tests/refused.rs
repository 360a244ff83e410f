//! Frames that are damaged, cut, or not for this guest: an error, and no page is placed.

use std::io;

use vmferry_memory::whole_hash;
use vmferry_wire::{FRAME_HEADER_BYTES, table_checksum};

use super::*;

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
fn delta_of_a_different_base_is_refused() {
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
fn delta_of_a_page_never_received_is_refused() {
    let (_source, _destination, bytes) = with_a_delta();
    let error = Side::new().place(&bytes).unwrap_err();
    assert!(error.to_string().contains("that are not here"), "{error}");
}

#[test]
fn delta_received_twice_is_applied_once() {
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
fn packed_part_of_the_wrong_length_is_refused() {
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
fn content_error_names_slot_and_page() {
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
fn damaged_frame_places_nothing() {
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
fn damaged_delta_changes_nothing() {
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
fn cut_frame_is_an_error_and_the_end_between_frames_is_not() {
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
fn unknown_slot_is_refused() {
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
fn page_of_another_lane_is_refused() {
    let (mut source, destination) = (Side::new(), Side::new());
    fill(&source.memory, 1, 7);
    let error = destination.place(&source.encode(1, &[1, STRAY], RAW).0).unwrap_err();
    assert!(matches!(error, CodecError::Stray { page: STRAY, .. }), "{error}");
    assert!(destination.memory.populated().unwrap().is_empty());
}
