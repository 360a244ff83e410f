//! Every kernel compared with a bit-by-bit walk.

use proptest::prelude::*;

use super::*;

fn naive_runs(words: &[u64]) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    let bits = (0..words.len() as u64 * 64)
        .filter(|bit| words[(bit / 64) as usize] >> (bit % 64) & 1 == 1);
    for bit in bits {
        match runs.last_mut() {
            Some((first, count)) if *first + *count == bit => *count += 1,
            _ => runs.push((bit, 1)),
        }
    }
    runs
}

/// Words as they occur in bitmaps: stretches that are clear, set, scattered or dense.
fn words() -> impl Strategy<Value = Vec<u64>> {
    let stretch = (0_usize..200, 0..5, any::<u64>()).prop_map(|(length, kind, seed)| {
        let mut random = fastrand::Rng::with_seed(seed);
        std::iter::repeat_with(|| random.u64(..))
            .take(length)
            .map(|word| match kind {
                0 => 0,
                1 => u64::MAX,
                2 => 1 << (word % 64),
                3 => word,
                _ => !(1 << (word % 64)),
            })
            .collect::<Vec<_>>()
    });
    prop::collection::vec(stretch, 0..6).prop_map(|stretches| stretches.concat())
}

proptest! {
    #[test]
    fn every_kernel_matches_a_bit_by_bit_walk(words in words()) {
        let expected = naive_runs(&words);
        for kernel in Kernel::available() {
            let runs: Vec<_> = flat_runs_with(kernel, &words).collect();
            prop_assert_eq!(&runs, &expected, "{:?}, as an iterator", kernel);
            let mut folded = Vec::new();
            flat_runs_with(kernel, &words).for_each(|run| folded.push(run));
            prop_assert_eq!(&folded, &expected, "{:?}, folded", kernel);
            let mut rest = flat_runs_with(kernel, &words);
            let mut both: Vec<_> = rest.by_ref().take(3).collect();
            rest.for_each(|run| both.push(run));
            prop_assert_eq!(&both, &expected, "{:?}, half and half", kernel);
        }
    }

    #[test]
    fn skip_stops_at_the_first_different_word(
        same in prop_oneof![Just(0), Just(u64::MAX)], length in 0_usize..300, from in 0_usize..300,
        other in 0_usize..300
    ) {
        let from = from.min(length);
        let mut words = vec![same; length];
        if let Some(word) = words.get_mut(other) {
            *word ^= 1 << (other % 64);
        }
        let expected = if (from..length).contains(&other) { other } else { length };
        for kernel in Kernel::available() {
            prop_assert_eq!(kernel::skip(kernel, &words, from, same), expected, "{:?}", kernel);
        }
    }

    #[test]
    fn ranges_cut_runs_only_at_their_ends(
        words in words(),
        cuts in prop::collection::btree_set(0_usize..900, 0..8),
    ) {
        let inner = cuts.into_iter().filter(|cut| *cut < words.len());
        let cuts: Vec<usize> = inner.chain([words.len()]).collect();
        let ranges = cuts.windows(2).map(|pair| pair[0]..pair[1]).step_by(2);
        let mut expected = Vec::new();
        for range in ranges.clone() {
            let first = range.start as u64 * 64;
            let runs = naive_runs(&words[range]).into_iter();
            expected.extend(runs.map(|(at, count)| (first + at, count)));
        }
        for kernel in Kernel::available() {
            let runs: Vec<_> = Runs::new(kernel, &words, ranges.clone()).collect();
            prop_assert_eq!(&runs, &expected, "{:?}", kernel);
        }
    }
}

#[test]
fn long_runs_and_gaps_are_found() {
    let mut words = vec![0; 1 << 16];
    words[5] = 1;
    words[100..60_000].fill(u64::MAX);
    words[65_000] = 1 << 63;
    for kernel in Kernel::available() {
        let runs: Vec<_> = flat_runs_with(kernel, &words).collect();
        assert_eq!(runs, [(320, 1), (6400, 59_900 * 64), (65_000 * 64 + 63, 1)], "{kernel:?}");
    }
}
