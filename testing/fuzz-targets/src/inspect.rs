//! Any bytes, read as the files of `vmferry inspect`.

use vmferry_inspect::{End, Inspector};
use vmferry_transport::{Direction, RecordingHeader, RecordingSide};
use vmferry_wire::{
    CONTROL_HEADER_BYTES, FRAME_HEADER_BYTES, FrameHeader, HELLO_BYTES, HELLO_REPLY_BYTES,
    table_checksum,
};

use super::input::Input;

/// The memory for checking deltas.
const HELD_BYTES: u64 = 64 << 12;

/// Report runs and segments, too.
pub const RUNS: u8 = 8;
/// Correct the checksums, so that the code after the checksum tests is reached.
pub const SEALED: u8 = 16;

/// The first byte selects the kind of input: a file of any kind, a journal, a session's control
/// channel in both directions with one of its data channels, or two channels to the destination.
/// Two numbers say where one file ends and the next one begins. Each file is preceded by a
/// recording's header.
pub fn run(data: &[u8]) {
    read(data);
}

/// Returns the names of the reported records.
pub fn read(data: &[u8]) -> Vec<&'static str> {
    let mut told = Vec::new();
    let mut input = Input(data);
    let first = input.byte();
    let lengths = [input.word(), input.word()].map(usize::from);
    let mut inspector = Inspector::new(HELD_BYTES, first & RUNS != 0);
    let (one, rest) = input.0.split_at(lengths[0].min(input.0.len()));
    let (other, last) = rest.split_at(lengths[1].min(rest.len()));
    let mut channel = |direction, bytes: &[u8]| {
        let mut bytes = bytes.to_vec();
        if first & SEALED != 0 {
            seal(direction, &mut bytes);
        }
        let side = RecordingSide::Source;
        let header = RecordingHeader { side, direction, connection: 0, at: 0 };
        let file = [&header.encode()[..], &bytes].concat();
        look(&mut inspector, "channel", &file, &mut told);
    };
    match first % 4 {
        0 => look(&mut inspector, "any", input.0, &mut told),
        1 => look(&mut inspector, "a.source.journal", input.0, &mut told),
        2 => {
            channel(Direction::ToDestination, one);
            channel(Direction::ToSource, other);
            channel(Direction::ToDestination, last);
        }
        _ => {
            channel(Direction::ToDestination, one);
            channel(Direction::ToDestination, rest);
        }
    }
    for text in inspector.disagreements() {
        assert!(!text.is_empty());
    }
    told
}

/// Corrects the checksums of all messages or frames after a greeting, wherever their lengths point.
fn seal(direction: Direction, bytes: &mut [u8]) {
    // The role: 2 is a data channel.
    let is_data = direction == Direction::ToDestination && bytes.get(12) == Some(&2);
    let greeting = match direction {
        Direction::ToDestination => HELLO_BYTES,
        Direction::ToSource => HELLO_REPLY_BYTES,
    };
    let mut left = bytes.get_mut(greeting..).unwrap_or_default();
    let sealed = if is_data { seal_frame } else { seal_message };
    while let Some(length) = sealed(left) {
        left = &mut left[length..];
    }
}

/// Returns the frame's length if the frame is complete.
fn seal_frame(bytes: &mut [u8]) -> Option<usize> {
    let (head, rest) = bytes.split_first_chunk_mut::<FRAME_HEADER_BYTES>()?;
    // All checksums are CRC-32C. An absent table has checksum 0, and no other value is valid then.
    head[FRAME_HEADER_BYTES - 8..FRAME_HEADER_BYTES - 4].fill(0);
    let checksum = table_checksum(&head[..FRAME_HEADER_BYTES - 4]);
    head[FRAME_HEADER_BYTES - 4..].copy_from_slice(&checksum.to_le_bytes());
    let header = FrameHeader::parse(head).ok()?;
    let table = rest.get(..header.table_bytes())?;
    *head = FrameHeader { table_checksum: table_checksum(table), ..header }.encode();
    let length = FRAME_HEADER_BYTES + header.table_bytes() + header.payload_bytes as usize;
    (length <= bytes.len()).then_some(length)
}

/// Returns the message's length if the message is complete.
fn seal_message(bytes: &mut [u8]) -> Option<usize> {
    let (head, rest) = bytes.split_first_chunk_mut::<CONTROL_HEADER_BYTES>()?;
    let length = u32::from_le_bytes(*head.first_chunk()?) as usize;
    let checksum = table_checksum(rest.get(..length)?);
    head[8..].copy_from_slice(&checksum.to_le_bytes());
    Some(CONTROL_HEADER_BYTES + length)
}

/// Checks that records are contiguous, that nothing is reported after the end, and that a break is
/// within the file.
fn look(inspector: &mut Inspector, name: &str, bytes: &[u8], told: &mut Vec<&'static str>) {
    let (mut records, mut text) = (0_u64, 0);
    let outcome = inspector
        .file(name, bytes, &mut |record| {
            records += 1;
            told.push(record.record);
            text += record.to_string().len();
            assert!(record.offset + record.bytes <= bytes.len() as u64, "{record:?}");
            Ok(())
        })
        .expect("memory can be read");
    assert_eq!(outcome.records, records);
    assert!(outcome.bytes <= bytes.len() as u64);
    match &outcome.end {
        End::Whole => assert_eq!(outcome.bytes, bytes.len() as u64),
        End::CutOff { offset, needed, found, .. } => {
            assert!(offset + found <= bytes.len() as u64 && needed > found, "{outcome:?}");
        }
        End::Broken(broken) => {
            assert!(broken.offset <= bytes.len() as u64 && !broken.problem.is_empty());
        }
    }
    assert!(!outcome.end.to_string().is_empty());
    assert!(text < (1 << 20) + bytes.len() * 64);
}
