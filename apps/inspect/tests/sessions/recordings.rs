//! A valid session, each way to damage it, and where the damage is reported.

use crate::support::{Recorded, VERSIONS, change_header, seal};
use vmferry_inspect::{Break, End, Inspector, Kind};
use vmferry_transport::RECORDING_HEADER_BYTES;
use vmferry_wire::{
    CONTROL_HEADER_BYTES, FRAME_HEADER_BYTES, FrameHeader, HELLO_BYTES, table_checksum,
};

const RUN: usize = vmferry_wire::RUN_HEADER_BYTES;

#[test]
fn valid_session_is_whole() {
    for version in VERSIONS {
        let (outcomes, told, disagreements) = Recorded::new(version, 1).inspect();
        assert!(outcomes.iter().all(|one| one.end == End::Whole), "{told}");
        assert!(disagreements.is_empty(), "{disagreements:?}");
        for wanted in ["raw=4", "delta=4", "packed=3", "zero=2", "algorithm=zstd", "vcpu.regs"] {
            assert!(told.contains(wanted), "{wanted} is not in:\n{told}");
        }
        assert!(!told.contains("unchecked") && !told.contains("unknown_fields"), "{told}");
        // Since version 2 both sides send their release.
        let releases = told.matches(r#"release={"vmferry":"0.1.0","vmm":"microvm 0.1.0"}"#);
        assert_eq!(releases.count(), [0, 2][usize::from(version > 1)], "{told}");
    }
}

/// A newer release may add fields: unknown optional fields are reported, unknown mandatory fields
/// are an error.
#[test]
fn unknown_optional_fields_are_reported_and_mandatory_ones_rejected() {
    let good = Recorded::new(2, 1);
    for message in 0..good.messages.len() {
        let mut newer = good.clone();
        // FINAL ends with the state, so no field can follow.
        if message == 1 {
            continue;
        }
        newer.append(message, b"\x2c\x01\x03\0\0\0new");
        let (outcomes, told, _) = newer.inspect();
        assert!(outcomes.iter().all(|one| one.end == End::Whole), "{told}");
        assert!(told.contains(" unknown_fields=[300]"), "{told}");
        let mut newer = good.clone();
        newer.append(message, b"\x2c\x81\x03\0\0\0new");
        let offset = newer.messages[message] + CONTROL_HEADER_BYTES;
        found(&newer, 0, offset, "300");
        let mut torn = good.clone();
        torn.append(message, b"\x2c\x01\x04\0\0\0new");
        found(&torn, 0, offset, "field 300 has 4 bytes, but 3 are left");
    }
}

/// The file and the break of a session that has exactly one.
fn break_of(recorded: &Recorded) -> (usize, Break) {
    let (outcomes, told, _) = recorded.inspect();
    let mut breaks = outcomes.iter().enumerate().filter_map(|(file, outcome)| match &outcome.end {
        End::Broken(broken) => Some((file, broken.clone())),
        _ => None,
    });
    let first = breaks.next().unwrap_or_else(|| panic!("nothing is wrong:\n{told}"));
    assert!(breaks.next().is_none(), "one break only:\n{told}");
    first
}

#[track_caller]
fn found(recorded: &Recorded, file: usize, offset: usize, problem: &str) {
    let (found, broken) = break_of(recorded);
    assert_eq!((found, broken.offset as usize), (file, offset), "{broken:?}");
    assert!(broken.problem.contains(problem), "{broken:?}");
}

#[test]
fn control_channel_damage_is_located() {
    VERSIONS.for_each(check_control_channel_damage);
}

fn check_control_channel_damage(version: u16) {
    let good = Recorded::new(version, 1);
    let hello = RECORDING_HEADER_BYTES;
    let [begin, last, commit] = good.messages[..] else { unreachable!() };
    let damaged = |at: usize, by: u8| {
        let mut bad = good.clone();
        bad.control[at] ^= by;
        bad
    };
    found(&damaged(8, 1), 0, 0, "version");
    found(&damaged(hello, 1), 0, hello, "not vmferry");
    found(&damaged(begin + 6, 1), 0, begin, "reserved");
    found(&damaged(begin + 4, 0x40), 0, begin, "65");
    found(
        &damaged(begin + CONTROL_HEADER_BYTES + 3, 1),
        0,
        begin + CONTROL_HEADER_BYTES,
        "checksum",
    );
    found(&damaged(commit + 8, 1), 0, commit + CONTROL_HEADER_BYTES, "checksum");
    // A message that only the other side may send.
    let mut bad = good.clone();
    let [accept, placed, ..] = good.messages_back[..] else { unreachable!() };
    bad.control.truncate(commit);
    bad.control.extend_from_slice(&good.control_back[accept..placed]);
    found(&bad, 0, commit, "the source must not send it");
    // The last byte of the state is changed; the message's checksum is correct.
    let mut bad = good.clone();
    bad.control[commit - 1] ^= 1;
    let sum = table_checksum(&bad.control[last + CONTROL_HEADER_BYTES..commit]);
    bad.control[last + 8..last + 12].copy_from_slice(&sum.to_le_bytes());
    let (file, broken) = break_of(&bad);
    assert_eq!(file, 0);
    assert!(broken.problem.contains("\"serial\""), "{broken:?}");
    assert!((last..commit).contains(&(broken.offset as usize)), "{broken:?}");
}

#[test]
fn data_channel_damage_is_located() {
    let good = Recorded::new(2, 1);
    let table = |number: usize| good.frames[number] + FRAME_HEADER_BYTES;
    let changed = |number: usize, change: &dyn Fn(&mut [u8])| {
        let mut bad = good.clone();
        let frame = good.frame(number).len();
        change(&mut bad.data[good.frames[number]..][..frame]);
        bad
    };
    let flipped = |at: usize| {
        let mut bad = good.clone();
        bad.data[at] ^= 0x10;
        bad
    };
    // Frames 0, 2, 4, 6 and 8 hold pages; 1, 3, 5 and 7 end rounds.
    found(&flipped(good.frames[1] + 9), 2, good.frames[1], "checksum");
    found(&flipped(good.frames[1]), 2, good.frames[1], "");
    found(&flipped(table(0) + 2), 2, table(0), "checksum");
    found(&flipped(table(0) + RUN + 5000), 2, table(0) + RUN, "hash to");
    found(&flipped(table(6) + RUN + 9), 2, table(6) + RUN, "");
    // The sum of a run of zeros, which only the table contains.
    let bad = changed(8, &|frame| {
        frame[FRAME_HEADER_BYTES + 16] ^= 1;
        seal(frame);
    });
    found(&bad, 2, table(8), "hash to");
    // The base sum of the deltas, and one of the deltas.
    let packed = table(4) + RUN;
    found(&flipped(packed), 2, packed, "that are not here");
    let bad = changed(4, &|frame| *frame.last_mut().unwrap() ^= 1);
    found(&bad, 2, packed, "hash to");
    // A missing frame, and a wrong number, round and slot.
    let mut bad = good.clone();
    bad.data.drain(good.frames[2]..good.frames[3]);
    found(&bad, 2, good.frames[2] + 16, "expected number 3 of lane 0, found 4");
    let bad = changed(2, &|frame| change_header(frame, |head| FrameHeader { round: 0, ..head }));
    found(&bad, 2, good.frames[2] + 8, "expected round 1 or a later one, found 0");
    let slot = vmferry_memory::SlotId(3);
    let bad = changed(2, &|frame| change_header(frame, |head| FrameHeader { slot, ..head }));
    found(&bad, 2, good.frames[2] + 6, "the guest has 1 slots");
    // The same pages twice in a round.
    let mut bad = good.clone();
    let mut again = good.frame(8).to_vec();
    change_header(&mut again, |head| FrameHeader { sequence: 10, ..head });
    bad.data.extend_from_slice(&again);
    found(&bad, 2, good.data.len() + FRAME_HEADER_BYTES, "a second time in round 5");
}

#[test]
fn page_of_another_lane_is_reported() {
    let mut recorded = Recorded::new(2, 2);
    let (at, length) = (recorded.frames[8], recorded.frame(8).len());
    let frame = &mut recorded.data[at..at + length];
    let sum = (600..602).fold(0_u64, |sum: u64, page| {
        sum.wrapping_add(vmferry_memory::zero_page_hash(vmferry_memory::SlotId(0), page))
    });
    frame[FRAME_HEADER_BYTES..][..8].copy_from_slice(&600_u64.to_le_bytes());
    frame[FRAME_HEADER_BYTES + 16..][..8].copy_from_slice(&sum.to_le_bytes());
    seal(frame);
    // Without the control channel the number of lanes is unknown.
    assert_eq!(alone(&recorded.data).0, End::Whole);
    let problem = "expected pages of lane 0 of 2, found page 600 of slot 0 of lane 1";
    found(&recorded, 2, at + FRAME_HEADER_BYTES, problem);
}

/// Reads one file. Returns its end and the output.
fn alone(bytes: &[u8]) -> (End, String) {
    let mut told = String::new();
    let outcome = Inspector::new(1 << 20, false).file("file", bytes, &mut |record| {
        told += &format!("{record}\n");
        Ok(())
    });
    (outcome.unwrap().end, told)
}

#[test]
fn cut_recording_is_not_broken() {
    let good = Recorded::new(2, 1);
    for (name, file) in [("data", &good.data), ("control", &good.control)] {
        let first = RECORDING_HEADER_BYTES + HELLO_BYTES;
        for length in (1..file.len()).step_by(997).chain(1..first + 60) {
            let whole = match name {
                "data" => good.frames.contains(&length),
                _ => good.messages.contains(&length),
            };
            match alone(&file[..length]).0 {
                End::Whole => assert!(whole || length == first, "{name} cut at {length}"),
                End::CutOff { offset, needed, found, .. } => {
                    assert!(!whole && needed > found, "{name} cut at {length}");
                    assert_eq!(offset + found, length as u64, "{name} cut at {length}");
                }
                End::Broken(broken) => panic!("{name} cut at {length}: {broken:?}"),
            }
        }
    }
}

#[test]
fn deltas_of_unrecorded_pages_are_unchecked() {
    let good = Recorded::new(2, 1);
    let mut bad = good.clone();
    bad.data.drain(good.frames[0]..good.frames[4]);
    // The channel was reconnected, so it may start anywhere.
    bad.data[RECORDING_HEADER_BYTES + 32] = 1;
    let (end, told) = alone(&bad.data);
    assert_eq!(end, End::Whole, "{told}");
    assert!(told.contains("delta=4"), "{told}");
    assert!(told.contains("unchecked=4"), "{told}");
}

#[test]
fn contradictions_between_files_are_reported() {
    let good = Recorded::new(2, 1);
    let mut bad = good.clone();
    let last = *good.frames.last().unwrap();
    bad.data.truncate(last);
    let (outcomes, _, disagreements) = bad.inspect();
    assert!(outcomes.iter().all(|one| one.end == End::Whole));
    let all = disagreements.join("\n");
    assert!(all.contains("PLACED names frame 9 of lane 0, but its last frame is 8"), "{all}");
    assert!(all.contains("FINAL names 9 as the last frame of lane 0, but that is 8"), "{all}");
    // A file that is cut off within a frame may have had more frames.
    bad.data.extend_from_slice(&good.data[last..last + 10]);
    assert!(bad.inspect().2.is_empty());
}

/// Each recorder counts its channels from 0, so two recordings use the same numbers.
#[test]
fn recordings_in_two_directories_are_two_sessions() {
    let one = Recorded::new(2, 1);
    let mut other = Recorded::carried(2);
    // Another session with another token and ID.
    for file in [&mut other.data, &mut other.control_back] {
        let old = [9; 16];
        let at = file.windows(16).position(|bytes| bytes == old).unwrap();
        file[at..at + 16].fill(8);
    }
    let [accept, placed, ..] = other.messages_back[..] else { unreachable!() };
    let sum = table_checksum(&other.control_back[accept + CONTROL_HEADER_BYTES..placed]);
    other.control_back[accept + 8..accept + 12].copy_from_slice(&sum.to_le_bytes());
    // In the best order: control channels first.
    let files = |recorded: &Recorded| {
        let Recorded { control, control_back, data, data_back, .. } = recorded.clone();
        [control, control_back, data, data_back]
    };
    let read = |paths: [&str; 2], files: [[Vec<u8>; 4]; 2]| {
        let mut inspector = Inspector::new(1 << 20, false);
        for turns in [0..2, 2..4] {
            for turn in turns {
                for (path, files) in paths.iter().zip(&files) {
                    let outcome = inspector.file(path, &files[turn][..], &mut |_| Ok(()));
                    assert_eq!(outcome.unwrap().end, End::Whole, "file {turn} of {path}");
                }
            }
        }
        let found = inspector.disagreements();
        assert!(found.is_empty(), "{found:?}");
    };
    read(["one/0000.vmftrace", "other/0000.vmftrace"], [files(&one), files(&other)]);
    // In one directory they differ by their time.
    let mut later = files(&other);
    later.iter_mut().for_each(|file| file[16] ^= 1);
    read(["0000.vmftrace", "0000-again.vmftrace"], [files(&one), later]);
}

#[test]
fn repeated_page_in_a_broken_frame_does_not_affect_the_next_frame() {
    let good = Recorded::new(2, 1);
    let mut bad = good.clone();
    // Pages of round 5 are sent again, with a wrong sum.
    let mut again = good.frame(8).to_vec();
    again[FRAME_HEADER_BYTES + 16] ^= 1;
    seal(&mut again);
    change_header(&mut again, |head| FrameHeader { sequence: 10, ..head });
    bad.data.extend_from_slice(&again);
    let mut inspector = Inspector::new(1 << 20, false);
    let (outcomes, _) = bad.read_by(&mut inspector, "file");
    assert!(matches!(outcomes[2].end, End::Broken(_)));
    // Other pages on a reconnected channel.
    let mut next = good.data[..good.frames[0]].to_vec();
    next[RECORDING_HEADER_BYTES + 32] = 1;
    let mut frame = good.frame(0).to_vec();
    change_header(&mut frame, |head| FrameHeader { sequence: 11, round: 6, ..head });
    next.extend_from_slice(&frame);
    let outcome = inspector.file("file", &next[..], &mut |_| Ok(())).unwrap();
    assert_eq!(outcome.end, End::Whole);
}

#[test]
fn empty_file_is_cut_off() {
    let mut inspector = Inspector::new(1 << 20, false);
    let mut read = |name: &str| inspector.file(name, &[][..], &mut |_| Ok(())).unwrap();
    let outcome = read("record/0000-to-source.vmftrace");
    assert_eq!(outcome.kind, Kind::Recording);
    let End::CutOff { needed, found, .. } = outcome.end else { panic!("{outcome:?}") };
    assert_eq!((needed, found), (RECORDING_HEADER_BYTES as u64, 0));
    let outcome = read("state");
    assert!(outcome.kind == Kind::Unknown && matches!(outcome.end, End::CutOff { .. }));
    // A journal is created before its first line is written.
    let outcome = read("00.source.journal");
    assert_eq!((outcome.kind, outcome.end), (Kind::Journal, End::Whole));
}
