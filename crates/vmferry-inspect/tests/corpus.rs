//! The seeds of the fuzz target of files that are inspected, through the same function.

#[path = "../../../fuzz/harness/input.rs"]
#[allow(dead_code, reason = "the target uses a part of it")]
mod input;
#[path = "../../../fuzz/harness/inspect.rs"]
mod inspect;
#[path = "../../../fuzz/harness/replay.rs"]
mod replay;
mod support;

use support::Recorded;
use vmferry_transport::RECORDING_HEADER_BYTES;

#[test]
fn every_seed_is_handled() {
    replay::every_seed("inspect", inspect::run);
}

#[test]
fn every_seed_cut_and_damaged_is_handled() {
    replay::every_seed_cut_and_damaged("inspect", inspect::run, 60);
}

/// `cargo test -p vmferry-inspect --test corpus -- --ignored` after a change of a format.
#[test]
#[ignore = "writes the seeds"]
fn write_the_seeds() {
    let recorded = Recorded::new(1);
    let rest = |file: &[u8]| file[RECORDING_HEADER_BYTES..].to_vec();
    let both = |first: u8, one: &[u8], other: &[u8]| {
        let (one, other) = (rest(one), rest(other));
        [&[first][..], &(one.len() as u16).to_le_bytes(), &one, &other].concat()
    };
    let Recorded { control, control_back, data, data_back, .. } = &recorded;
    let mut seeds = vec![
        ("control", both(2, control, control_back)),
        ("control-with-runs", both(10, control, control_back)),
        ("data", both(10, data, data_back)),
        ("control-and-data", both(3, control, data)),
        ("data-twice", both(3, data, data)),
    ];
    for (name, file) in [("control", control), ("data", data)] {
        let mut file = file.clone();
        file.truncate(3000);
        let whole = [&[0, 0, 0][..], &file].concat();
        seeds.push((if name == "data" { "whole-data" } else { "whole-control" }, whole));
    }
    let journal = b"\x01\0\0 00000000 {\"record\":\"commit\"}\n".to_vec();
    seeds.push(("journal", journal));
    replay::write("inspect", seeds.into_iter().map(|(name, seed)| (name.to_owned(), seed)));
}
