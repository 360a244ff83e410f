//! The seeds of a fuzz target through its body, where there is no fuzzer.

use std::path::PathBuf;

/// A target's body.
pub type Target = fn(&[u8]);

/// Where a target's seeds are.
pub fn corpus(target: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target)
}

/// The target's seeds in the tree, by path.
pub fn in_the_tree(target: &str) -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(corpus(target)).expect("seeds are in the tree");
    entries
        .map(|entry| {
            let path = entry.unwrap().path();
            (path.display().to_string(), std::fs::read(path).unwrap())
        })
        .collect()
}

/// Runs every seed.
pub fn every_seed(target: &str, run: Target) {
    let seeds = in_the_tree(target);
    assert!(seeds.len() >= 8, "{target} has {} seeds", seeds.len());
    for (path, data) in seeds {
        named(&path, run, &data);
    }
}

/// Runs a cheap neighbourhood of each seed: so many of its lengths, and a bit at as many places of it.
pub fn every_seed_cut_and_damaged(target: &str, run: Target, places: usize) {
    for (path, mut data) in in_the_tree(target) {
        let step = data.len() / places + 1;
        for at in (0..data.len()).step_by(step) {
            named(&path, run, &data[..at]);
            let bit = 1 << (at % 8);
            data[at] ^= bit;
            named(&path, run, &data);
            data[at] ^= bit;
        }
    }
}

/// Writes a target's seeds into the tree.
pub fn write(target: &str, seeds: impl IntoIterator<Item = (String, Vec<u8>)>) {
    std::fs::create_dir_all(corpus(target)).unwrap();
    for (name, seed) in seeds {
        std::fs::write(corpus(target).join(name), seed).unwrap();
    }
}

/// Runs a target, and says with which bytes it was if it panics.
fn named(path: &str, run: Target, data: &[u8]) {
    let result = std::panic::catch_unwind(|| run(data));
    assert!(result.is_ok(), "{path}, perhaps changed: {data:02x?}");
}
