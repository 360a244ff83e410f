//! The seeds of the fuzz targets through the same functions, so that what fuzzing has covered stays
//! covered where there is no fuzzer.

#[path = "../../../fuzz/harness/mod.rs"]
mod harness;
#[path = "corpus/seeds.rs"]
mod seeds;

use std::path::PathBuf;

use harness::{TARGETS, Target};

fn corpus(target: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target)
}

/// The target's seeds, by file name.
fn seeds(target: &str) -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(corpus(target)).expect("seeds are in the tree");
    entries
        .map(|entry| {
            let path = entry.unwrap().path();
            (path.display().to_string(), std::fs::read(path).unwrap())
        })
        .collect()
}

#[test]
fn every_seed_is_handled() {
    for (name, run) in TARGETS {
        let seeds = seeds(name);
        assert!(seeds.len() >= 8, "{name} has {} seeds", seeds.len());
        for (path, data) in seeds {
            named(&path, run, &data);
        }
    }
}

/// A cheap neighbourhood of each seed: every length of it, and a bit of every byte.
#[test]
fn every_seed_cut_and_damaged_is_handled() {
    for (name, run) in TARGETS {
        for (path, mut data) in seeds(name) {
            // Frames are long: some places of each will do.
            let step = data.len() / 24 + 1;
            for at in (0..data.len()).step_by(step) {
                named(&path, run, &data[..at]);
                let bit = 1 << (at % 8);
                data[at] ^= bit;
                named(&path, run, &data);
                data[at] ^= bit;
            }
        }
    }
}

/// Runs a target, and says with which bytes it was if it panics.
fn named(path: &str, run: Target, data: &[u8]) {
    let result = std::panic::catch_unwind(|| run(data));
    assert!(result.is_ok(), "{path}, perhaps changed: {data:02x?}");
}

#[test]
fn the_seeds_of_frames_reach_the_memory() {
    for (name, seed) in seeds::seeds("frame") {
        assert!(seeds::are_placed(&seed), "{name}");
    }
}

/// `cargo test -p vmferry-codec --test corpus -- --ignored` after a change of the formats.
#[test]
#[ignore = "writes the seeds"]
fn write_the_seeds() {
    for (target, _) in TARGETS {
        std::fs::create_dir_all(corpus(target)).unwrap();
        for (name, seed) in seeds::seeds(target) {
            std::fs::write(corpus(target).join(name), seed).unwrap();
        }
    }
}
