//! The seeds of the fuzz target through the same function, and any other bytes.

#[allow(dead_code, reason = "seeds use a part of it")]
#[path = "../../../../crates/qemu/tests/qemus/stream/samples.rs"]
mod samples;
mod seeds;

use super::replay;
use vmferry_fuzz_targets::qemu_stream;

use proptest::prelude::*;

#[test]
fn every_seed_is_handled() {
    replay::every_seed("qemu_stream", qemu_stream::run);
}

#[test]
fn every_seed_cut_and_damaged_is_handled() {
    replay::every_seed_cut_and_damaged("qemu_stream", qemu_stream::run, 100);
}

/// The fuzzer begins behind the pages, not before them.
#[test]
fn the_seeds_have_pages_in_them() {
    assert_eq!(qemu_stream::LAYOUT, [samples::RAM, samples::ROM]);
    for (name, multifd, sample) in seeds::samples() {
        let found = samples::look(multifd, &sample.bytes).0;
        assert_eq!(found, sample.marks, "{name}");
        assert!(!found.pages.is_empty(), "{name}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_bytes_are_handled(data in prop::collection::vec(any::<u8>(), 0..1500)) {
        qemu_stream::run(&data);
    }
}

#[test]
fn the_seeds_are_in_the_tree() {
    replay::are_in_the_tree("qemu_stream", seeds(), |_| false);
}

/// `cargo test -p vmferry-fuzz-targets -- --ignored` after a change of what the bytes mean.
#[test]
#[ignore = "writes the seeds"]
fn write_the_seeds() {
    replay::write("qemu_stream", seeds());
}

fn seeds() -> Vec<(String, Vec<u8>)> {
    let seed = |multifd, sample: &samples::Sample| {
        qemu_stream::seed(multifd, [4095, 7, 20_000], &sample.bytes)
    };
    let samples = seeds::samples().into_iter();
    samples.map(|(name, multifd, sample)| (name.to_string(), seed(multifd, &sample))).collect()
}
