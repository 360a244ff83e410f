//! Runs the seeds of a fuzz target through its body, without a fuzzer.

use std::collections::BTreeMap;
use std::path::PathBuf;

use vmferry_fuzz_targets::Target;

/// The directory of a target's seeds.
pub fn corpus(target: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target)
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

/// Runs a small neighborhood of each seed: `places` of its prefixes, and a flipped bit at as many
/// positions.
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

/// Writes a target's seeds into the tree, and removes those that are no longer generated. Inputs
/// found by a fuzzer stay.
pub fn write(target: &str, seeds: impl IntoIterator<Item = (String, Vec<u8>)>) {
    std::fs::create_dir_all(corpus(target)).unwrap();
    for (name, _) in generated(target) {
        std::fs::remove_file(corpus(target).join(name)).unwrap();
    }
    for (name, seed) in seeds {
        assert!(!is_found(&name), "{name} is a name that a fuzzer gives");
        std::fs::write(corpus(target).join(name), seed).unwrap();
    }
}

/// Checks that the tree has exactly the generated seeds, so that after a change of a format or of a
/// target's input the fuzzer has no meaningless seeds. `differs` selects the seeds that differ each
/// time they are generated; only their names are compared.
pub fn are_in_the_tree(
    target: &str,
    seeds: impl IntoIterator<Item = (String, Vec<u8>)>,
    differs: impl Fn(&str) -> bool,
) {
    let mut left = generated(target);
    for (name, seed) in seeds {
        let found = left.remove(&name);
        let found = found.unwrap_or_else(|| panic!("{target} has no seed {name} in the tree"));
        assert!(
            found == seed || differs(&name),
            "{name} of {target} differs from the one in the tree"
        );
    }
    let left: Vec<String> = left.into_keys().collect();
    assert!(left.is_empty(), "these seeds of {target} are no longer generated: {left:?}");
}

/// The target's generated seeds in the tree, by name.
fn generated(target: &str) -> BTreeMap<String, Vec<u8>> {
    let name = |path: &str| path.rsplit('/').next().unwrap_or(path).to_owned();
    let seeds = in_the_tree(target).into_iter().map(|(path, seed)| (name(&path), seed));
    seeds.filter(|(name, _)| !is_found(name)).collect()
}

/// A fuzzer names its inputs by a SHA-1, with a prefix such as `crash-`.
fn is_found(name: &str) -> bool {
    let hash = name.rsplit('-').next().unwrap_or(name);
    hash.len() == 40 && hash.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Runs a target, and names the input if the target panics.
fn named(path: &str, run: Target, data: &[u8]) {
    let result = std::panic::catch_unwind(|| run(data));
    assert!(result.is_ok(), "{path}, perhaps changed: {data:02x?}");
}
