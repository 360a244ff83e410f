//! Runs the seeds of the balloon's fuzz target, and any other bytes.

mod seeds;

use vmferry_fuzz_targets::balloon;

use proptest::prelude::*;

seed_tests!(balloon, places: 100, differs: |_| false);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn arbitrary_bytes_are_handled(data in prop::collection::vec(any::<u8>(), 0..1500)) {
        balloon::run(&data);
    }
}

fn seeds() -> Vec<(String, Vec<u8>)> {
    seeds::seeds().into_iter().map(|(name, seed)| (name.to_string(), seed)).collect()
}
