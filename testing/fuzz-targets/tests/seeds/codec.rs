//! The seeds of the fuzz targets through the same functions, so that what fuzzing has covered stays
//! covered where there is no fuzzer.

mod seeds;

use super::replay;
use vmferry_fuzz_targets::{Target, delta, frame, frame_sealed, piece, round_trip};

const TARGETS: [(&str, Target); 5] = [
    ("delta", delta::run),
    ("frame", frame::run),
    ("frame_sealed", frame_sealed::run),
    ("piece", piece::run),
    ("round_trip", round_trip::run),
];

#[test]
fn every_seed_is_handled() {
    for (name, run) in TARGETS {
        replay::every_seed(name, run);
    }
}

/// A cheap neighbourhood of each seed: frames are long, so that some places of each will do.
#[test]
fn every_seed_cut_and_damaged_is_handled() {
    for (name, run) in TARGETS {
        replay::every_seed_cut_and_damaged(name, run, 24);
    }
}

#[test]
fn the_seeds_of_frames_reach_the_memory() {
    for (name, seed) in seeds::seeds("frame") {
        assert!(seeds::are_placed(&seed), "{name}");
    }
}

/// What zlib makes of the same bytes depends on the processor.
#[test]
fn the_seeds_are_in_the_tree() {
    for (target, _) in TARGETS {
        replay::are_in_the_tree(target, seeds::seeds(target), |name| name.starts_with("zlib-"));
    }
}

/// `cargo test -p vmferry-fuzz-targets -- --ignored` after a change of the formats.
#[test]
#[ignore = "writes the seeds"]
fn write_the_seeds() {
    for (target, _) in TARGETS {
        replay::write(target, seeds::seeds(target));
    }
}
