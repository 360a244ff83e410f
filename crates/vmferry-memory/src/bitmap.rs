//! A bitmap of pages and its traversal by machine word.
//!
//! Bit `b` of word `w` is page `64 * w + b`. Bits beyond the last page are always clear, so words
//! can be counted and compared whole.

use std::fmt;

const WORD_BITS: u64 = 64;

/// One bit per page of a slot.
///
/// A new bitmap is zeroed memory from the system: the words of a huge sparse guest cost nothing
/// until a bit is set.
#[derive(Clone, PartialEq, Eq)]
pub struct PageBitmap {
    words: Vec<u64>,
    pages: u64,
}

impl PageBitmap {
    /// A clear bitmap of `pages` pages.
    #[must_use]
    pub fn new(pages: u64) -> Self {
        Self { words: vec![0; pages.div_ceil(WORD_BITS) as usize], pages }
    }

    /// Pages that the bitmap covers.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// The words. Bit `b` of word `w` is page `64 * w + b`.
    #[must_use]
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Sets a page.
    ///
    /// # Panics
    /// If the page is beyond the end.
    pub fn set(&mut self, page: u64) {
        self.set_run(page, 1);
    }

    /// Clears a page.
    ///
    /// # Panics
    /// If the page is beyond the end.
    pub fn clear(&mut self, page: u64) {
        self.clear_run(page, 1);
    }

    /// Whether a page is set; pages beyond the end are not.
    #[must_use]
    pub fn is_set(&self, page: u64) -> bool {
        self.words
            .get((page / WORD_BITS) as usize)
            .is_some_and(|word| word >> (page % WORD_BITS) & 1 == 1)
    }

    /// Sets `count` pages from `first`.
    ///
    /// # Panics
    /// If the run reaches beyond the end.
    pub fn set_run(&mut self, first: u64, count: u64) {
        self.each_word_of(first, count, |word, mask| *word |= mask);
    }

    /// Clears `count` pages from `first`.
    ///
    /// # Panics
    /// If the run reaches beyond the end.
    pub fn clear_run(&mut self, first: u64, count: u64) {
        self.each_word_of(first, count, |word, mask| *word &= !mask);
    }

    fn each_word_of(&mut self, first: u64, count: u64, change: impl Fn(&mut u64, u64)) {
        let end = first.checked_add(count).filter(|end| *end <= self.pages);
        let end = end.unwrap_or_else(|| {
            panic!("pages {first}+{count} are beyond a bitmap of {} pages", self.pages)
        });
        let mut page = first;
        while page < end {
            let bit = page % WORD_BITS;
            let bits = (WORD_BITS - bit).min(end - page);
            let mask = (u64::MAX >> (WORD_BITS - bits)) << bit;
            change(&mut self.words[(page / WORD_BITS) as usize], mask);
            page += bits;
        }
    }

    /// Ors words into the bitmap from word `first_word` on; bits beyond the last page are
    /// dropped, as are words beyond the end.
    pub fn or_words(&mut self, first_word: usize, words: &[u64]) {
        let last = self.words.len().wrapping_sub(1);
        let tail = self.tail_mask();
        let ours = self.words.iter_mut().enumerate().skip(first_word);
        for ((index, ours), word) in ours.zip(words) {
            if *word != 0 {
                *ours |= if index == last { word & tail } else { *word };
            }
        }
    }

    fn tail_mask(&self) -> u64 {
        match self.pages % WORD_BITS {
            0 => u64::MAX,
            bits => (1 << bits) - 1,
        }
    }

    /// Number of set pages.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Whether no page is set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// Sets every page that `other` has. Words that `other` has clear are not written.
    pub fn union_with(&mut self, other: &Self) {
        for (ours, theirs) in self.words.iter_mut().zip(&other.words) {
            if *theirs != 0 {
                *ours |= theirs;
            }
        }
    }

    /// Clears every page that `other` has.
    pub fn subtract(&mut self, other: &Self) {
        for (ours, theirs) in self.words.iter_mut().zip(&other.words) {
            if *theirs != 0 {
                *ours &= !theirs;
            }
        }
    }

    /// Clears all. Words that are clear are not written, so that they cost no memory.
    pub fn clear_all(&mut self) {
        for word in &mut self.words {
            if *word != 0 {
                *word = 0;
            }
        }
    }

    /// Sets all.
    pub fn set_all(&mut self) {
        self.set_run(0, self.pages);
    }

    /// Runs of consecutive set pages as (first, count), in order, joined across words.
    #[must_use]
    pub fn runs(&self) -> Runs<'_> {
        Runs { words: &self.words, page: 0 }
    }
}

impl fmt::Debug for PageBitmap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageBitmap({} of {} pages)", self.count(), self.pages)
    }
}

/// Iterates the runs of a [`PageBitmap`]; see [`PageBitmap::runs`].
#[derive(Debug)]
pub struct Runs<'a> {
    words: &'a [u64],
    page: u64,
}

impl Runs<'_> {
    /// The next page from `self.page` on whose bit, after `flip`, is set.
    fn next_bit(&self, flip: u64) -> Option<u64> {
        let mut index = (self.page / WORD_BITS) as usize;
        let mut word = (*self.words.get(index)? ^ flip) >> (self.page % WORD_BITS);
        if word != 0 {
            return Some(self.page + u64::from(word.trailing_zeros()));
        }
        loop {
            index += 1;
            word = *self.words.get(index)? ^ flip;
            if word != 0 {
                return Some(index as u64 * WORD_BITS + u64::from(word.trailing_zeros()));
            }
        }
    }
}

impl Iterator for Runs<'_> {
    type Item = (u64, u64);

    fn next(&mut self) -> Option<(u64, u64)> {
        let first = self.next_bit(0)?;
        self.page = first;
        let end = self.next_bit(u64::MAX).unwrap_or(self.words.len() as u64 * WORD_BITS);
        self.page = end;
        Some((first, end - first))
    }
}

#[cfg(test)]
mod tests {
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
        fn runs_are_those_of_a_bit_by_bit_walk(
            pages in prop::collection::vec(prop::bool::weighted(0.7), 0..400)
        ) {
            let bitmap = bitmap_of(&pages);
            prop_assert_eq!(bitmap.runs().collect::<Vec<_>>(), naive_runs(&pages));
            prop_assert_eq!(bitmap.count(), pages.iter().filter(|set| **set).count() as u64);
        }

        #[test]
        fn runs_set_and_cleared_are_those_of_an_array(
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
        fn union_and_subtract_are_set_algebra(
            pairs in prop::collection::vec((any::<bool>(), any::<bool>()), 1..300)
        ) {
            let (a, b): (Vec<bool>, Vec<bool>) = pairs.iter().copied().unzip();
            let (mut union, mut difference) = (bitmap_of(&a), bitmap_of(&a));
            union.union_with(&bitmap_of(&b));
            difference.subtract(&bitmap_of(&b));
            let or: Vec<bool> = pairs.iter().map(|(a, b)| *a || *b).collect();
            let minus: Vec<bool> = pairs.iter().map(|(a, b)| *a && !*b).collect();
            prop_assert_eq!(union, bitmap_of(&or));
            prop_assert_eq!(difference, bitmap_of(&minus));
        }
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
    fn a_run_beyond_the_end_is_a_bug() {
        PageBitmap::new(64).set_run(60, u64::MAX);
    }
}
