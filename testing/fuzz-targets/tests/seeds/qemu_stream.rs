//! Runs the seeds of the fuzz target of QEMU's streams, and any other bytes.

#[allow(dead_code, reason = "seeds use a part of it")]
#[path = "../../../../crates/qemu/tests/qemus/stream/samples.rs"]
mod samples;
mod seeds;

use vmferry_fuzz_targets::qemu_stream;

use proptest::prelude::*;

seed_tests!(qemu_stream, places: 100, differs: |_| false);

/// The seeds take the fuzzer to streams with pages.
#[test]
fn seeds_contain_pages() {
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
    fn arbitrary_bytes_are_handled(data in prop::collection::vec(any::<u8>(), 0..1500)) {
        qemu_stream::run(&data);
    }
}

fn seeds() -> Vec<(String, Vec<u8>)> {
    let seed = |multifd, sample: &samples::Sample| {
        qemu_stream::seed(multifd, [4095, 7, 20_000], &sample.bytes)
    };
    let samples = seeds::samples().into_iter();
    samples.map(|(name, multifd, sample)| (name.to_string(), seed(multifd, &sample))).collect()
}
