//! Bitmaps compared with arrays of flags.

use proptest::prelude::*;

use super::*;

fn naive_runs(pages: &[bool]) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for (page, _) in pages.iter().enumerate().filter(|(_, set)| **set) {
        match runs.last_mut() {
            Some((first, count)) if *first + *count == page as u64 => *count += 1,
            _ => runs.push((page as u64, 1)),
        }
    }
    runs
}

fn bitmap_of(pages: &[bool]) -> PageBitmap {
    let mut bitmap = PageBitmap::new(pages.len() as u64);
    for (page, set) in pages.iter().enumerate() {
        if *set {
            bitmap.set(page as u64);
        }
    }
    bitmap
}

proptest! {
    #[test]
    fn runs_match_a_bit_by_bit_walk(
        pages in prop::collection::vec(prop::bool::weighted(0.7), 0..400)
    ) {
        let bitmap = bitmap_of(&pages);
        prop_assert_eq!(bitmap.runs().collect::<Vec<_>>(), naive_runs(&pages));
        prop_assert_eq!(bitmap.count(), pages.iter().filter(|set| **set).count() as u64);
    }

    #[test]
    fn set_run_and_clear_run_match_an_array(
        steps in prop::collection::vec((0_u64..300, 0_u64..200, any::<bool>()), 0..20)
    ) {
        let mut bitmap = PageBitmap::new(300);
        let mut naive = vec![false; 300];
        for (first, count, set) in steps {
            let count = count.min(300 - first);
            if set { bitmap.set_run(first, count) } else { bitmap.clear_run(first, count) }
            naive[first as usize..(first + count) as usize].fill(set);
        }
        prop_assert_eq!(bitmap, bitmap_of(&naive));
    }

    #[test]
    fn union_difference_and_intersection_match_set_algebra(
        pairs in prop::collection::vec((any::<bool>(), any::<bool>()), 1..300)
    ) {
        let (a, b): (Vec<bool>, Vec<bool>) = pairs.iter().copied().unzip();
        let (mut union, mut difference) = (bitmap_of(&a), bitmap_of(&a));
        let mut both = PageBitmap::new(a.len() as u64);
        both.set_run(0, a.len() as u64 / 2);
        both.set_to_intersection(&bitmap_of(&a), &bitmap_of(&b));
        let and: Vec<bool> = pairs.iter().map(|(a, b)| *a && *b).collect();
        prop_assert_eq!(both, bitmap_of(&and));
        union.union_with(&bitmap_of(&b));
        difference.subtract(&bitmap_of(&b));
        let or: Vec<bool> = pairs.iter().map(|(a, b)| *a || *b).collect();
        let minus: Vec<bool> = pairs.iter().map(|(a, b)| *a && !*b).collect();
        prop_assert_eq!(union, bitmap_of(&or));
        prop_assert_eq!(difference, bitmap_of(&minus));
    }
}

proptest! {
    #[test]
    fn or_words_matches_single_bits(
        pages in 0_u64..2000, first in 0_usize..40,
        words in prop::collection::vec(prop_oneof![3 => Just(0), 2 => any::<u64>()], 0..40)
    ) {
        let mut bitmap = PageBitmap::new(pages);
        bitmap.or_words(first, &words);
        let mut naive = PageBitmap::new(pages);
        let is_set = |page: &u64| words[(page / 64) as usize] >> (page % 64) & 1 == 1;
        for page in (0..words.len() as u64 * 64).filter(is_set) {
            let page = first as u64 * 64 + page;
            if page < pages {
                naive.set(page);
            }
        }
        prop_assert_eq!(&bitmap, &naive);
        prop_assert_eq!(bitmap.runs().collect::<Vec<_>>(), naive.runs().collect::<Vec<_>>());
        for (block, words) in words.as_chunks::<8>().0.iter().enumerate() {
            if ((block + 1) * 512) as u64 <= pages.next_multiple_of(512) {
                naive.or_block(block, words);
                bitmap.or_words(block * 8, words);
            }
        }
        prop_assert_eq!(&bitmap, &naive);
    }

    #[test]
    fn next_block_finds_every_page(
        runs in prop::collection::vec((0_u64..20_000, 1_u64..900), 0..12)
    ) {
        let mut bitmap = PageBitmap::new(21_000);
        for (first, count) in runs {
            bitmap.set_run(first, count);
        }
        let mut all = PageBitmap::new(21_000);
        let mut next = bitmap.next_block(0);
        while let Some(block) = next {
            all.or_block(block, bitmap.block(block));
            next = bitmap.next_block(block + 1);
        }
        prop_assert_eq!(all, bitmap);
    }
}

#[test]
fn cleared_bitmap_equals_a_new_one() {
    let (mut cleared, fresh) = (PageBitmap::new(5000), PageBitmap::new(5000));
    cleared.set_run(600, 3000);
    assert_ne!(cleared, fresh);
    cleared.clear_run(600, 3000);
    assert_eq!(cleared, fresh);
    assert!(cleared.is_empty());
    assert_eq!(cleared.runs().count(), 0);
    assert_ne!(PageBitmap::new(5001), fresh, "of another length");
}

#[test]
fn bits_beyond_the_end_stay_clear() {
    let mut bitmap = PageBitmap::new(70);
    bitmap.or_words(0, &[u64::MAX, u64::MAX, u64::MAX]);
    assert_eq!(bitmap.count(), 70);
    assert_eq!(bitmap.runs().collect::<Vec<_>>(), [(0, 70)]);
    bitmap.clear_all();
    bitmap.set_all();
    assert_eq!(bitmap.count(), 70);
    assert!(!bitmap.is_set(70));
}

#[test]
#[should_panic(expected = "beyond a bitmap of 64 pages")]
fn set_run_beyond_the_end_panics() {
    PageBitmap::new(64).set_run(60, u64::MAX);
}
