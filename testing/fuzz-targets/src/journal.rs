//! Any bytes, read as a journal.

use vmferry_handover::journal::{
    Record, SessionSummary, Side, Verdict, decode, recover_destination, recover_source,
};
use vmferry_handover::{DestinationState, SourceState, WitnessId};
use vmferry_wire::SessionId;

use super::input::Input;

/// With an even first byte the rest is a journal, of the side that the next bit names. With an odd
/// first byte the rest selects records that a correct writer would write, and damage with matching
/// checksums.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let first = input.byte();
    if first.is_multiple_of(2) {
        any(input.0);
    } else {
        written(input);
    }
}

fn any(bytes: &[u8]) {
    let verdicts = [Side::Source, Side::Destination].map(|side| look(bytes, side));
    let here = |verdict: &Option<Verdict>| *verdict == Some(Verdict::Here);
    assert!(!verdicts.iter().all(here), "the guest is at both sides by the same bytes");
}

/// The verdict of the bytes as one side's journal; `None` if they are refused.
fn look(bytes: &[u8], side: Side) -> Option<Verdict> {
    let (records, whole) = match decode(bytes, side) {
        Ok(decoded) => decoded,
        Err(bad) => {
            let lines = bytes.iter().filter(|byte| **byte == b'\n').count();
            assert!((1..=lines).contains(&bad.line), "line {} of {lines}", bad.line);
            assert!(!bad.reason.to_string().is_empty());
            return None;
        }
    };
    // Everything up to the last line's end, and nothing after it.
    let expected = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    assert_eq!(whole, expected);
    // Optional records of a newer release are left out.
    assert!(records.len() <= bytes.iter().filter(|byte| **byte == b'\n').count());
    let again: Vec<u8> = records.iter().flat_map(Record::encode).collect();
    assert_eq!(decode(&again, side), Ok((records.clone(), again.len())));
    Some(verdict(records, side))
}

/// The verdict, compared with a simple reading of the records.
fn verdict(records: Vec<Record>, side: Side) -> Verdict {
    let has = |name: &str| records.iter().any(|record| record.name() == name);
    match side {
        Side::Source => {
            let (state, effects) = recover_source(&records);
            // After COMMIT only the other side's answer, or KEPT, lets the guest run here.
            if (has("commit") || has("commit-post-copy") || has("serving")) && !has("kept") {
                assert!(!state.may_run(), "{records:?}");
            }
            assert!(!effects.contains(&vmferry_handover::SourceEffect::SendCommit));
            assert!(!matches!(state, SourceState::InDoubt { recovered: false }));
        }
        Side::Destination => {
            let state = recover_destination(&records).map(|(state, _)| state);
            let runs = state.is_some_and(DestinationState::may_run);
            let intent = has("run-intent") || has("run-intent-post-copy");
            assert_eq!(runs, intent && !has("aborted"), "{records:?}");
            // The first RUN-INTENT counts. No journal has two.
            if !has("run-intent") && !has("fetched") {
                assert_ne!(state, Some(DestinationState::Owns), "{records:?}");
            }
            assert_eq!(state.is_none(), records.is_empty(), "{records:?}");
        }
    }
    SessionSummary::new(SessionId([1; 16]), side, records, false).verdict
}

fn written(mut input: Input<'_>) {
    let side = [Side::Source, Side::Destination][input.below(2) as usize];
    let records: Vec<Record> = (0..input.below(5)).map(|_| record(&mut input, side)).collect();
    let lines: Vec<Vec<u8>> = records.iter().map(Record::encode).collect();
    let mut bytes = lines.concat();
    assert_eq!(decode(&bytes, side), Ok((records.clone(), bytes.len())));
    // Cut at any byte: exactly the records that were complete are read.
    let cut = usize::from(input.word()) % (bytes.len() + 1);
    let whole = lines
        .iter()
        .scan(0, |sum, line| {
            *sum += line.len();
            (*sum <= cut).then_some(*sum)
        })
        .last()
        .unwrap_or(0);
    let (kept, length) = decode(&bytes[..cut], side).expect("a cut-off end is not damage");
    assert_eq!((length, &kept[..]), (whole, &records[..kept.len()]));
    if bytes.is_empty() {
        return;
    }
    // With damage in a complete line, no other records may be read.
    let (at, by) = (usize::from(input.word()) % bytes.len(), input.byte());
    bytes[at] ^= by;
    if by != 0
        && let Ok((found, _)) = decode(&bytes, side)
    {
        // Only damage at the end of the last line may go undetected: its record then counts as cut
        // off. The case of a checksum's digits does not matter.
        assert!(found == records || found[..] == records[..records.len() - 1], "{found:?}");
    }
}

fn record(input: &mut Input<'_>, side: Side) -> Record {
    let by_operator = input.byte().is_multiple_of(2);
    match (input.byte() % 3, side) {
        (0, _) => Record::Open {
            guest: vmferry_wire::GuestIdentity {
                uuid: uuid::Uuid::from_u128(u128::from(input.word())),
                name: text(input),
            },
            peer: text(input),
            peer_names: (0..input.below(3)).map(|_| text(input)).collect(),
            at: input.number(),
            order: input.number(),
            process: input.byte().is_multiple_of(2).then(|| text(input)),
            witness: WitnessId::new(&text(input)).ok(),
        },
        (1, Side::Source) => match input.byte() % 3 {
            0 => Record::Commit,
            1 => Record::CommitPostCopy,
            _ => Record::Serving,
        },
        (2, Side::Source) if input.byte().is_multiple_of(2) => Record::Given { by_operator },
        (_, Side::Source) => Record::Kept { by_operator },
        (1, Side::Destination) => match input.byte() % 4 {
            0 => Record::RunIntent,
            1 => Record::RunIntentPostCopy,
            2 => Record::Fetched,
            _ => Record::Ended,
        },
        (_, Side::Destination) => Record::Aborted { reason: text(input) },
    }
}

fn text(input: &mut Input<'_>) -> String {
    let length = usize::from(input.byte() % 32);
    String::from_utf8_lossy(input.bytes(length)).into_owned()
}
