//! Runs the seeds of the codec's fuzz targets.

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
fn seeds_are_handled() {
    for (name, run) in TARGETS {
        replay::every_seed(name, run);
    }
}

/// A small neighborhood of each seed: frames are long, so only some positions of each are tried.
#[test]
fn cut_and_damaged_seeds_are_handled() {
    for (name, run) in TARGETS {
        replay::every_seed_cut_and_damaged(name, run, 24);
    }
}

#[test]
fn seeds_of_frames_are_placed() {
    for (name, seed) in seeds::seeds("frame") {
        assert!(seeds::are_placed(&seed), "{name}");
    }
}

/// zlib's output for the same bytes depends on the processor.
#[test]
fn seeds_are_in_the_tree() {
    for (target, _) in TARGETS {
        replay::are_in_the_tree(target, seeds::seeds(target), |name| name.starts_with("zlib-"));
    }
}

/// Run `cargo test -p vmferry-fuzz-targets -- --ignored` after a change of the formats.
#[test]
#[ignore = "writes the seeds"]
fn write_the_seeds() {
    for (target, _) in TARGETS {
        replay::write(target, seeds::seeds(target));
    }
}
