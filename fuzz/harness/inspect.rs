//! Any bytes, taken for one or two of the files that `vmferry inspect` reads.

use vmferry_inspect::{End, Inspector};
use vmferry_transport::{Direction, RecordingHeader, RecordingSide};

use super::input::Input;

/// Pages to check deltas with.
const HELD_BYTES: u64 = 64 << 12;

/// The first byte says what is put before the rest: nothing, or the header of a recording in either direction, of which the
/// second half may be the other direction's.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let first = input.byte();
    let headed = |direction, bytes: &[u8]| {
        let header =
            RecordingHeader { side: RecordingSide::Source, direction, connection: 0, at: 0 };
        [&header.encode()[..], bytes].concat()
    };
    let mut inspector = Inspector::new(HELD_BYTES, first & 8 != 0);
    let cut = usize::from(input.word());
    let (one, other) = input.0.split_at(cut.min(input.0.len()));
    match first % 4 {
        0 => look(&mut inspector, "any", input.0),
        1 => look(&mut inspector, "a.source.journal", input.0),
        2 => {
            look(&mut inspector, "one", &headed(Direction::ToDestination, one));
            look(&mut inspector, "other", &headed(Direction::ToSource, other));
        }
        _ => {
            look(&mut inspector, "one", &headed(Direction::ToDestination, one));
            look(&mut inspector, "other", &headed(Direction::ToDestination, other));
        }
    }
    for text in inspector.disagreements() {
        assert!(!text.is_empty());
    }
}

/// Records follow each other, nothing is told behind the end, and a break is within the file.
fn look(inspector: &mut Inspector, name: &str, bytes: &[u8]) {
    let (mut records, mut text) = (0_u64, 0);
    let outcome = inspector
        .file(name, bytes, &mut |record| {
            records += 1;
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
