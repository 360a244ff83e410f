//! Runs the seeds of the fuzz target of inspected files.

#[path = "../../../../apps/inspect/tests/sessions/support/mod.rs"]
mod support;

use vmferry_fuzz_targets::inspect::{self, RUNS, SEALED};

use self::support::{Recorded, VERSIONS};
use vmferry_handover::journal::Record;
use vmferry_memory::{PageRun, SlotId};
use vmferry_transport::RECORDING_HEADER_BYTES;
use vmferry_wire::{CONTROL_HEADER_BYTES, FRAME_HEADER_BYTES, PageRequest};

seed_tests!(inspect, places: 60, differs: |_| false);

/// The seeds take the fuzzer past the checksums, to both kinds of frames.
#[test]
fn sealed_input_is_read_with_any_checksums() {
    for (recorded, wanted) in [(Recorded::new(2, 1), "run"), (Recorded::carried(2), "segment")] {
        let files = [&recorded.control, &recorded.control_back, &recorded.data];
        let right = inspect::read(&seed(2 | RUNS, files.map(|file| without_header(file))));
        for expected in ["BEGIN", "ACCEPT", "FINAL", "section", wanted] {
            assert!(right.contains(&expected), "{expected} is not in {right:?}");
        }
        let mut wrong = recorded.clone();
        let messages = recorded.messages.iter().map(|at| at + CONTROL_HEADER_BYTES - 4);
        messages.for_each(|at| wrong.control[at] ^= 1);
        let messages = recorded.messages_back.iter().map(|at| at + CONTROL_HEADER_BYTES - 4);
        messages.for_each(|at| wrong.control_back[at] ^= 1);
        for at in recorded.frames.iter().map(|at| at + FRAME_HEADER_BYTES) {
            wrong.data[at - 1] ^= 1;
            wrong.data[at - 5] ^= 1;
        }
        let files = [&wrong.control, &wrong.control_back, &wrong.data];
        let files = files.map(|file| without_header(file));
        assert!(inspect::read(&seed(2 | RUNS, files)).len() < 10);
        assert_eq!(inspect::read(&seed(2 | RUNS | SEALED, files)), right);
    }
}

fn seeds() -> Vec<(String, Vec<u8>)> {
    let mut seeds = Vec::new();
    for version in VERSIONS {
        let (pages, stream) = (Recorded::new(version, 1), Recorded::carried(version));
        for (name, recorded) in [("pages", &pages), ("stream", &stream)] {
            let Recorded { control, control_back, data, .. } = recorded;
            let files = [control, control_back, data].map(|file| without_header(file));
            seeds.push((format!("{name}-{version}"), seed(RUNS | SEALED | 2, files)));
            let control = [files[0], files[1], &[]];
            seeds.push((format!("control-of-{name}-{version}"), seed(RUNS | 2, control)));
        }
    }
    let recorded = Recorded::carried(2);
    let (control, data) = (without_header(&recorded.control), without_header(&recorded.data));
    seeds.push(("stream-twice".into(), seed(3, [data, &[], data])));
    seeds.push(("stream-and-control".into(), seed(3 | SEALED, [data, &[], control])));
    seeds.push(("whole-control".into(), seed(0, [&recorded.control, &[], &[]])));
    seeds.push(("state".into(), seed(0, [&support::state(), &[], &[]])));
    let pages = [(8, 1), (9, 64)].map(|(first, pages)| PageRun { slot: SlotId(0), first, pages });
    let requests = pages.map(|run| PageRequest::new(run).unwrap().encode()).concat();
    let requests = [support::reply(2), requests].concat();
    seeds.push(("requests".into(), seed(RUNS | 2, [control, &requests, data])));
    let journal = [Record::Commit, Record::Given { by_operator: true }, Record::Commit];
    let journal: Vec<u8> = journal.iter().flat_map(Record::encode).collect();
    seeds.push(("journal".into(), seed(1, [&journal, &[], &[]])));
    seeds.push(("journal-of-anyone".into(), seed(0, [&journal, &[], &[]])));
    seeds
}

/// Files in the target's order.
fn seed(first: u8, [one, other, last]: [&[u8]; 3]) -> Vec<u8> {
    let length = |file: &[u8]| (file.len() as u16).to_le_bytes();
    [&[first][..], &length(one), &length(other), one, other, last].concat()
}

fn without_header(file: &[u8]) -> &[u8] {
    &file[RECORDING_HEADER_BYTES..]
}
