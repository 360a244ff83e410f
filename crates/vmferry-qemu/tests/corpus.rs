//! The seeds of the fuzz target through the same function, and any other bytes.

#[allow(dead_code, reason = "the target uses a part of it")]
#[path = "../../../fuzz/harness/input.rs"]
mod input;
#[path = "../../../fuzz/harness/qemu_stream.rs"]
mod qemu_stream;
#[allow(dead_code, reason = "seeds use a part of it")]
#[path = "stream/samples.rs"]
mod samples;
#[path = "corpus/seeds.rs"]
mod seeds;

use std::path::PathBuf;

use proptest::prelude::*;

fn corpus() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/qemu_stream")
}

/// The seeds, by file name.
fn in_the_tree() -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(corpus()).expect("seeds are in the tree");
    entries
        .map(|entry| {
            let path = entry.unwrap().path();
            (path.display().to_string(), std::fs::read(path).unwrap())
        })
        .collect()
}

#[test]
fn every_seed_is_handled() {
    let seeds = in_the_tree();
    assert!(seeds.len() >= 8, "{} seeds", seeds.len());
    for (path, data) in seeds {
        named(&path, &data);
    }
}

/// A cheap neighbourhood of each seed: every length of it, and a bit of every byte.
#[test]
fn every_seed_cut_and_damaged_is_handled() {
    for (path, mut data) in in_the_tree() {
        let step = data.len() / 100 + 1;
        for at in (0..data.len()).step_by(step) {
            named(&path, &data[..at]);
            let bit = 1 << (at % 8);
            data[at] ^= bit;
            named(&path, &data);
            data[at] ^= bit;
        }
    }
}

/// Runs the target, and says with which bytes it was if it panics.
fn named(path: &str, data: &[u8]) {
    let result = std::panic::catch_unwind(|| qemu_stream::run(data));
    assert!(result.is_ok(), "{path}, perhaps changed: {data:02x?}");
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

/// `cargo test -p vmferry-qemu --test corpus -- --ignored` after a change of what the bytes mean.
#[test]
#[ignore = "writes the seeds"]
fn write_the_seeds() {
    std::fs::create_dir_all(corpus()).unwrap();
    for (name, multifd, sample) in seeds::samples() {
        let seed = qemu_stream::seed(multifd, [4095, 7, 20_000], &sample.bytes);
        std::fs::write(corpus().join(name), seed).unwrap();
    }
}
