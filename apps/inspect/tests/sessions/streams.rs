//! A VMM's migration stream in a recording: the output, each way to damage it, and the parts that
//! cannot be checked.

use crate::support::{Recorded, VERSIONS, change_header, seal};
use vmferry_inspect::{End, Inspector};
use vmferry_transport::RECORDING_HEADER_BYTES;
use vmferry_wire::{FRAME_HEADER_BYTES, FrameHeader, SEGMENT_TABLE_HEAD_BYTES};

/// The offset of the payload in a piece's frame.
fn payload_of(frame: &[u8]) -> usize {
    let header = FrameHeader::parse(frame.first_chunk().unwrap()).unwrap();
    FRAME_HEADER_BYTES + header.table_bytes()
}

/// Changes a piece and corrects the checksums.
fn changed(good: &Recorded, piece: usize, change: impl FnOnce(&mut [u8])) -> Recorded {
    let mut bad = good.clone();
    let length = good.frame(piece).len();
    let frame = &mut bad.data[good.frames[piece]..][..length];
    change(frame);
    seal(frame);
    bad
}

#[track_caller]
fn found(recorded: &Recorded, offset: usize, problem: &str) {
    let (outcomes, told, _) = recorded.inspect();
    let End::Broken(broken) = &outcomes[2].end else { panic!("nothing is wrong:\n{told}") };
    assert_eq!(broken.offset as usize, offset, "{broken:?}");
    assert!(broken.problem.contains(problem), "{broken:?}");
}

#[test]
fn valid_stream_is_whole() {
    for version in VERSIONS {
        let (outcomes, told, disagreements) = Recorded::carried(version).inspect();
        assert!(outcomes.iter().all(|one| one.end == End::Whole), "{told}");
        assert!(disagreements.is_empty(), "{disagreements:?}");
        assert!(!told.contains("unchecked"), "{told}");
        let count = |wanted: &str| told.matches(wanted).count();
        assert_eq!(count(" piece "), 5, "{told}");
        assert_eq!(count("encoding=kept-raw "), 3, "{told}");
        assert_eq!(count("encoding=kept-packed "), 3, "{told}");
        assert_eq!(count("encoding=delta "), 12, "{told}");
        assert!(count("encoding=raw") > 3 && count("encoding=packed") > 3, "{told}");
        assert!(told.contains("algorithm=zstd") && told.contains("zero_pages=2"), "{told}");
    }
}

#[test]
fn segments_have_their_offsets() {
    let recorded = Recorded::carried(2);
    let mut wanted = Vec::new();
    for frame in 0..recorded.frames.len() {
        let runs = FrameHeader::parse(recorded.frame(frame).first_chunk().unwrap()).unwrap().runs;
        let first = recorded.frames[frame] + FRAME_HEADER_BYTES + SEGMENT_TABLE_HEAD_BYTES;
        wanted.extend((0..runs as usize).map(|index| (first + 8 * index) as u64));
    }
    let mut found = Vec::new();
    let mut inspector = Inspector::new(1 << 20, true);
    let outcome = inspector.file("file", &recorded.data[..], &mut |record| {
        if record.record == "segment" {
            found.push(record.offset);
        }
        Ok(())
    });
    assert_eq!(outcome.unwrap().end, End::Whole);
    assert_eq!(found, wanted);
    // Without `runs` no segments are reported.
    let mut told = 0;
    let outcome = Inspector::new(1 << 20, false).file("file", &recorded.data[..], &mut |record| {
        told += usize::from(record.record == "segment");
        Ok(())
    });
    assert_eq!((outcome.unwrap().end, told), (End::Whole, 0));
}

#[test]
fn stream_damage_is_located() {
    let good = Recorded::carried(2);
    let table = |piece: usize| good.frames[piece] + FRAME_HEADER_BYTES;
    let payload = |piece: usize| good.frames[piece] + payload_of(good.frame(piece));
    // The piece's hash, and a byte of a page that is kept uncompressed.
    found(&changed(&good, 0, |frame| frame[FRAME_HEADER_BYTES] ^= 1), payload(0), "hash");
    let bad = changed(&good, 0, |frame| frame[payload_of(frame) + 900] ^= 1);
    found(&bad, payload(0), "hash");
    // An entry beyond the lane's limit, and one that was never kept.
    let last_segment = |frame: &[u8]| payload_of(frame) - 16;
    let entry = |entry: u32| {
        changed(&good, 2, |frame| {
            let at = last_segment(frame) + 4;
            frame[at..at + 4].copy_from_slice(&entry.to_le_bytes());
        })
    };
    found(&entry(1 << 18), table(2), "entry 262144 of 262144");
    found(&entry(700), payload(2), "700");
    // Deltas that exceed the page, and a packed part that is invalid.
    let bad = changed(&good, 2, |frame| {
        let at = payload_of(frame);
        frame[at..].fill(0xff);
    });
    let (outcomes, told, _) = bad.inspect();
    assert!(matches!(outcomes[2].end, End::Broken(_)), "{told}");
    let bad = changed(&good, 4, |frame| {
        let at = payload_of(frame);
        frame[at..].fill(0);
    });
    let (outcomes, told, _) = bad.inspect();
    assert!(matches!(outcomes[2].end, End::Broken(_)), "{told}");
}

#[test]
fn stream_without_its_beginning_is_unchecked() {
    let mut late = Recorded::carried(2);
    late.data.drain(late.frames[0]..late.frames[2]);
    // The channel was reconnected, so it may start anywhere.
    late.data[RECORDING_HEADER_BYTES + 32] = 1;
    let (outcomes, told, _) = late.inspect();
    assert!(outcomes.iter().all(|one| one.end == End::Whole), "{told}");
    assert_eq!(told.matches("unchecked=true").count(), 3, "{told}");
}

/// The pages that a lane keeps count against the memory limit, as guest pages do.
#[test]
fn valid_stream_without_memory_is_unchecked() {
    let good = Recorded::carried(2);
    for (bytes, unchecked) in [(0, 2), (8 << 10, 2), (1 << 20, 0)] {
        let (outcomes, told, _) = good.inspect_with(Inspector::new(bytes, true), "file");
        assert!(outcomes.iter().all(|one| one.end == End::Whole), "{bytes}: {told}");
        assert_eq!(told.matches("unchecked=true").count(), unchecked, "{bytes}: {told}");
    }
}

/// After a reconnection, the second file of a lane continues the first.
#[test]
fn stream_continues_after_a_reconnection() {
    let whole = Recorded::carried(2);
    let again = whole.frames[1]..whole.data.len();
    let mut second = whole.data[..whole.frames[0]].to_vec();
    second[RECORDING_HEADER_BYTES + 32] = 1;
    second.extend_from_slice(&whole.data[again]);
    let read = |first: &[u8]| {
        let (mut inspector, mut told) = (Inspector::new(1 << 20, false), String::new());
        let ends = [first, &second[..]].map(|file| {
            let outcome = inspector.file("file", file, &mut |record| {
                told += &format!("{record}\n");
                Ok(())
            });
            outcome.unwrap().end
        });
        (ends, told)
    };
    let (ends, told) = read(&whole.data[..whole.frames[3]]);
    assert_eq!(ends, [End::Whole, End::Whole], "{told}");
    assert_eq!(told.matches("again=true").count(), 2, "{told}");
    assert!(!told.contains("unchecked"), "{told}");
    // The same with damage at the end of the first file: the content of that piece is unknown.
    let mut damaged = whole.data[..whole.frames[3]].to_vec();
    *damaged.last_mut().unwrap() ^= 1;
    let ([first, second], told) = read(&damaged);
    assert!(matches!(first, End::Broken(_)), "{told}");
    assert_eq!(second, End::Whole, "{told}");
    assert_eq!(told.matches("unchecked=true").count(), 2, "{told}");
}

/// No frame can follow the highest sequence number.
#[test]
fn highest_sequence_number_is_the_last() {
    let mut late = Recorded::new(2, 1);
    late.data[RECORDING_HEADER_BYTES + 32] = 1;
    let frames = late.frames.clone();
    late.data.truncate(frames[2]);
    for (frame, next) in [(frames[0], frames[1]), (frames[1], frames[2])] {
        let sequence = u64::MAX;
        change_header(&mut late.data[frame..next], |head| FrameHeader { sequence, ..head });
    }
    let mut inspector = Inspector::new(1 << 20, false);
    let read = |inspector: &mut Inspector, file: &[u8]| {
        inspector.file("file", file, &mut |_| Ok(())).unwrap().end
    };
    let End::Broken(broken) = read(&mut inspector, &late.data) else {
        panic!("the frame is rejected")
    };
    assert_eq!(broken.offset as usize, frames[1] + 16);
    let problem = "of lane 0 after 18446744073709551615, the highest number";
    assert!(broken.problem.contains(problem), "{broken:?}");
    // The same for a channel that starts after it.
    let mut next = late.data[..frames[0]].to_vec();
    next[RECORDING_HEADER_BYTES + 32] = 0;
    next.extend_from_slice(&Recorded::new(2, 1).data[frames[0]..]);
    let End::Broken(broken) = read(&mut inspector, &next) else { panic!("the frame is rejected") };
    assert!(broken.problem.contains("the highest number"), "{broken:?}");
}
