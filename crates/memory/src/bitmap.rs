//! A bitmap of pages with a summary, so that clear blocks cost nothing.
//!
//! Bit `b` of word `w` is page `64 * w + b`. Bits beyond the last page are always clear, so words
//! can be counted and compared whole. One bit of the summary covers a block of 512 pages. If it is
//! clear, the block is clear; if it is set, the block may have set bits. Reading 64 KiB of summary
//! is enough to know that the bitmap of a terabyte is clean.

use std::fmt;
use std::ops::Range;

use crate::traverse::{self, BLOCK_PAGES, BLOCK_WORDS, Kernel, Runs, WORD_BITS, next_nonzero};

/// The words of a block.
type Block = [u64; BLOCK_WORDS];

/// One bit per page of a slot.
///
/// A new bitmap is zeroed memory from the system. The words of a huge sparse guest take no memory
/// until a bit is set, and no operation reads or writes words that the summary marks as clear.
#[derive(Eq)]
pub struct PageBitmap {
    blocks: Vec<Block>,
    /// Bit `b` of word `s` is block `64 * s + b`.
    summary: Vec<u64>,
    pages: u64,
}

impl PageBitmap {
    /// A clear bitmap of `pages` pages.
    #[must_use]
    pub fn new(pages: u64) -> Self {
        let blocks = pages.div_ceil(BLOCK_PAGES);
        Self {
            blocks: vec![[0; BLOCK_WORDS]; blocks as usize],
            summary: vec![0; blocks.div_ceil(WORD_BITS) as usize],
            pages,
        }
    }

    /// Number of pages that the bitmap covers.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// The words that cover the pages. Bit `b` of word `w` is page `64 * w + b`.
    #[must_use]
    pub fn words(&self) -> &[u64] {
        &self.blocks.as_flattened()[..self.pages.div_ceil(WORD_BITS) as usize]
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

    /// Whether a page is set. Pages beyond the end are not set.
    #[must_use]
    pub fn is_set(&self, page: u64) -> bool {
        let word = self.blocks.as_flattened().get((page / WORD_BITS) as usize);
        word.is_some_and(|word| word >> (page % WORD_BITS) & 1 == 1)
    }

    /// Sets `count` pages from `first`.
    ///
    /// # Panics
    /// If the run reaches beyond the end.
    pub fn set_run(&mut self, first: u64, count: u64) {
        let end = self.end_of(first, count);
        change_run(self.blocks.as_flattened_mut(), first, end, |word, mask| *word |= mask);
        if count > 0 {
            let blocks = first / BLOCK_PAGES..end.div_ceil(BLOCK_PAGES);
            change_run(&mut self.summary, blocks.start, blocks.end, |word, mask| *word |= mask);
        }
    }

    /// Clears `count` pages from `first`.
    ///
    /// # Panics
    /// If the run reaches beyond the end.
    pub fn clear_run(&mut self, first: u64, count: u64) {
        let end = self.end_of(first, count);
        change_run(self.blocks.as_flattened_mut(), first, end, |word, mask| *word &= !mask);
    }

    fn end_of(&self, first: u64, count: u64) -> u64 {
        first.checked_add(count).filter(|end| *end <= self.pages).unwrap_or_else(|| {
            panic!("pages {first}+{count} are beyond a bitmap of {} pages", self.pages)
        })
    }

    /// Ors words into the bitmap, starting at word `first_word`. Bits beyond the last page and
    /// words beyond the end are dropped.
    pub fn or_words(&mut self, first_word: usize, words: &[u64]) {
        let all = self.pages.div_ceil(WORD_BITS) as usize;
        let words = &words[..words.len().min(all.saturating_sub(first_word))];
        let ours = self.blocks.as_flattened_mut();
        let mut at = next_nonzero(words, 0);
        while at < words.len() {
            // Up to the end of the destination block: set words are mostly adjacent.
            let index = first_word + at;
            let end = words.len().min(at + BLOCK_WORDS - index % BLOCK_WORDS);
            for (ours, word) in ours[index..].iter_mut().zip(&words[at..end]) {
                *ours |= word;
            }
            let block = index / BLOCK_WORDS;
            self.summary[block / 64] |= 1 << (block % 64);
            at = match words.get(end) {
                Some(0) => next_nonzero(words, end),
                _ => end,
            };
        }
        if first_word + words.len() == all && !words.is_empty() {
            let tail = self.tail_mask();
            self.blocks.as_flattened_mut()[all - 1] &= tail;
        }
    }

    /// Ors 512 pages into the bitmap, starting at page `512 * block`.
    ///
    /// # Panics
    /// If the block is beyond the end.
    pub fn or_block(&mut self, block: usize, words: &[u64; BLOCK_WORDS]) {
        let tail = self.tail_mask();
        let last = self.pages.div_ceil(WORD_BITS) as usize;
        for (ours, word) in self.blocks[block].iter_mut().zip(words) {
            *ours |= word;
        }
        if block + 1 == self.blocks.len() {
            let used = last - block * BLOCK_WORDS;
            self.blocks[block][used..].fill(0);
            self.blocks[block][used - 1] &= tail;
        }
        self.summary[block / 64] |= 1 << (block % 64);
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
        let counts = self.held().map(|blocks| traverse::count(self.blocks[blocks].as_flattened()));
        counts.sum()
    }

    /// Whether no page is set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held().all(|blocks| {
            let words = self.blocks[blocks].as_flattened();
            next_nonzero(words, 0) == words.len()
        })
    }

    /// Sets every page that is set in `other`, which has the same length. Clear blocks of `other`
    /// are neither read nor written.
    pub fn union_with(&mut self, other: &Self) {
        for blocks in other.held() {
            let theirs = other.blocks[blocks.clone()].as_flattened();
            for (ours, theirs) in self.blocks[blocks].as_flattened_mut().iter_mut().zip(theirs) {
                *ours |= theirs;
            }
        }
        for (ours, theirs) in self.summary.iter_mut().zip(&other.summary) {
            *ours |= theirs;
        }
    }

    /// Clears every page that is set in `other`, which has the same length.
    pub fn subtract(&mut self, other: &Self) {
        for blocks in other.held() {
            let theirs = other.blocks[blocks.clone()].as_flattened();
            for (ours, theirs) in self.blocks[blocks].as_flattened_mut().iter_mut().zip(theirs) {
                *ours &= !theirs;
            }
        }
    }

    /// Sets exactly the pages that are set in both `one` and `other`, which have the same length.
    pub fn set_to_intersection(&mut self, one: &Self, other: &Self) {
        self.clear_all();
        for blocks in one.held() {
            for block in blocks {
                if other.summary[block / 64] & (1 << (block % 64)) == 0 {
                    continue;
                }
                let both =
                    std::array::from_fn(|word| one.blocks[block][word] & other.blocks[block][word]);
                self.or_block(block, &both);
            }
        }
    }

    /// Clears all pages. Blocks that are already clear are not written, so they take no memory.
    pub fn clear_all(&mut self) {
        let held = HeldBlocks { summary: &self.summary, next: 0 };
        held.for_each(|blocks| self.blocks[blocks].fill([0; BLOCK_WORDS]));
        self.summary.fill(0);
    }

    /// Sets all pages.
    pub fn set_all(&mut self) {
        self.set_run(0, self.pages);
    }

    /// Runs of consecutive set pages as (first, count), in order, merged across words.
    #[must_use]
    pub fn runs(&self) -> Runs<'_, Held<'_>> {
        Runs::new(Kernel::best(), self.blocks.as_flattened(), Held(self.held()))
    }

    /// Whether a block of 512 pages may have a set page. If not, the block is clear.
    #[must_use]
    pub fn may_hold(&self, block: usize) -> bool {
        self.summary.get(block / 64).is_some_and(|word| word >> (block % 64) & 1 == 1)
    }

    /// Number of the first block of 512 pages at or after block `from` that may have a set page.
    #[must_use]
    pub fn next_block(&self, from: usize) -> Option<usize> {
        self.held().next_block(from, 0).filter(|block| *block < self.blocks.len())
    }

    /// The words of block `block`: 512 pages, starting at page `512 * block`.
    ///
    /// # Panics
    /// If the block is beyond the end.
    #[must_use]
    pub fn block(&self, block: usize) -> &[u64; BLOCK_WORDS] {
        &self.blocks[block]
    }

    /// Disjoint ranges of blocks that may have set pages.
    fn held(&self) -> HeldBlocks<'_> {
        HeldBlocks { summary: &self.summary, next: 0 }
    }
}

/// Iterates ranges of blocks that may have set pages. A summary is small, so it is read one run of
/// bits at a time without further optimization.
#[derive(Debug)]
struct HeldBlocks<'a> {
    summary: &'a [u64],
    next: usize,
}

impl HeldBlocks<'_> {
    /// The first block at or after `from` whose summary bit is set after XOR with `flip`.
    #[inline]
    fn next_block(&self, from: usize, flip: u64) -> Option<usize> {
        let index = from / 64;
        let word = (*self.summary.get(index)? ^ flip) >> (from % 64);
        if word != 0 {
            return Some(from + word.trailing_zeros() as usize);
        }
        let index = traverse::next_other(self.summary, index + 1, flip);
        let word = self.summary.get(index)? ^ flip;
        Some(index * 64 + word.trailing_zeros() as usize)
    }
}

impl Iterator for HeldBlocks<'_> {
    type Item = Range<usize>;

    #[inline]
    fn next(&mut self) -> Option<Range<usize>> {
        let start = self.next_block(self.next, 0)?;
        self.next = self.next_block(start, u64::MAX).unwrap_or(self.summary.len() * 64);
        Some(start..self.next)
    }
}

/// Disjoint ranges of words that may have set bits.
#[derive(Debug)]
pub struct Held<'a>(HeldBlocks<'a>);

impl Iterator for Held<'_> {
    type Item = Range<usize>;

    #[inline]
    fn next(&mut self) -> Option<Range<usize>> {
        let blocks = self.0.next()?;
        Some(blocks.start * BLOCK_WORDS..blocks.end * BLOCK_WORDS)
    }
}

/// Applies `change` to each word that overlaps bits `first..end`, with the mask of the bits in that
/// range.
fn change_run(words: &mut [u64], first: u64, end: u64, change: impl Fn(&mut u64, u64)) {
    let mut at = first;
    while at < end {
        let bit = at % WORD_BITS;
        let bits = (WORD_BITS - bit).min(end - at);
        let mask = (u64::MAX >> (WORD_BITS - bits)) << bit;
        change(&mut words[(at / WORD_BITS) as usize], mask);
        at += bits;
    }
}

impl Clone for PageBitmap {
    /// Clear blocks take no memory in the clone.
    fn clone(&self) -> Self {
        let mut clone = Self::new(self.pages);
        clone.union_with(self);
        clone
    }
}

impl PartialEq for PageBitmap {
    /// Whether both have the same length and the same set pages.
    fn eq(&self, other: &Self) -> bool {
        let all_of = |one: &Self, other: &Self| {
            one.held().all(|blocks| one.blocks[blocks.clone()] == other.blocks[blocks])
        };
        self.pages == other.pages && all_of(self, other) && all_of(other, self)
    }
}

impl fmt::Debug for PageBitmap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageBitmap({} of {} pages)", self.count(), self.pages)
    }
}

#[cfg(test)]
mod tests;
