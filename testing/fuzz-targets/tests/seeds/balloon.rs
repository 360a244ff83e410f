//! The seeds of the fuzz target through the same function, and any other bytes.

mod seeds;

use super::replay;
use vmferry_fuzz_targets::balloon;

use proptest::prelude::*;

#[test]
fn every_seed_is_handled() {
    replay::every_seed("balloon", balloon::run);
}

#[test]
fn every_seed_cut_and_damaged_is_handled() {
    replay::every_seed_cut_and_damaged("balloon", balloon::run, 100);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_bytes_are_handled(data in prop::collection::vec(any::<u8>(), 0..1500)) {
        balloon::run(&data);
    }
}

#[test]
fn the_seeds_are_in_the_tree() {
    replay::are_in_the_tree("balloon", seeds(), |_| false);
}

/// `cargo test -p vmferry-fuzz-targets -- --ignored` after a change of what the bytes mean.
#[test]
#[ignore = "writes the seeds"]
fn write_the_seeds() {
    replay::write("balloon", seeds());
}

fn seeds() -> Vec<(String, Vec<u8>)> {
    seeds::seeds().into_iter().map(|(name, seed)| (name.to_string(), seed)).collect()
}
