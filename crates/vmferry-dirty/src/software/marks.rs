//! A bitmap that threads mark while another one takes what is marked.
//!
//! Like `vmferry_memory::PageBitmap` it has a summary, one bit for a block of 512 pages, so that taking
//! a clean one costs nothing. A mark sets the page's bit first and the summary's after it; taking
//! takes the summary first and the words after it. With a full fence in between on both sides, either
//! the taker sees the page's bit, or the marker sees that the summary was taken and sets it again: no
//! mark stays in a word that no summary bit leads to. A mark in a word that has others leaves that to
//! whoever made the first of them; if that one is interrupted before it does, the mark is late.

use std::sync::atomic::Ordering;

use vmferry_memory::PageBitmap;
use vmferry_memory::traverse::{BLOCK_PAGES, BLOCK_WORDS};

use super::sync::{AtomicU64, fence_after_rmw};

/// A cache line of bits, so that one mark and one take touch one line.
#[repr(align(64))]
#[derive(Debug)]
struct Block([AtomicU64; BLOCK_WORDS]);

impl Block {
    /// Takes the words that have any bit. A look first: an exchange costs as much as ten looks. All looks
    /// come before the first exchange, so that what is guessed wrong is guessed once for a block.
    #[inline]
    fn take(&self) -> [u64; BLOCK_WORDS] {
        let mut marked = 0_u32;
        for (index, bits) in self.0.iter().enumerate() {
            marked |= u32::from(bits.load(Ordering::Relaxed) != 0) << index;
        }
        let mut words = [0; BLOCK_WORDS];
        while marked != 0 {
            let index = marked.trailing_zeros() as usize % BLOCK_WORDS;
            marked &= marked - 1;
            words[index] = self.0[index].swap(0, Ordering::AcqRel);
        }
        words
    }
}

fn drop_marks(summary: &AtomicU64) {
    if summary.load(Ordering::Relaxed) != 0 {
        summary.swap(0, Ordering::AcqRel);
    }
}

/// One bit for each page of a slot, marked and taken atomically.
#[derive(Debug)]
pub struct Marks {
    blocks: Box<[Block]>,
    /// Bit `b` of word `s` is block `64 * s + b`.
    summary: Box<[AtomicU64]>,
    pages: u64,
}

impl Marks {
    /// None of `pages` pages is marked.
    #[must_use]
    pub fn new(pages: u64) -> Self {
        let blocks = pages.div_ceil(BLOCK_PAGES);
        let block = |_| Block(std::array::from_fn(|_| AtomicU64::new(0)));
        let summary = (0..blocks.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Self { blocks: (0..blocks).map(block).collect(), summary, pages }
    }

    /// Marks a page; one beyond the end is nobody's.
    #[inline]
    pub fn mark(&self, page: u64) {
        self.mark_in_word(page / 64, 1 << (page % 64));
    }

    /// Marks the pages from `first` to `last`; those beyond the end are nobody's.
    pub fn mark_through(&self, first: u64, last: u64) {
        let end = last.saturating_add(1).min(self.pages);
        let mut page = first;
        while page < end {
            let bits = (64 - page % 64).min(end - page);
            self.mark_in_word(page / 64, u64::MAX >> (64 - bits) << (page % 64));
            page += bits;
        }
    }

    #[inline]
    fn mark_in_word(&self, word: u64, mask: u64) {
        let block = (word / BLOCK_WORDS as u64) as usize;
        let (Some(bits), Some(summary)) = (self.blocks.get(block), self.summary.get(block / 64))
        else {
            return;
        };
        // Release: whoever takes the mark sees the write that was made before it.
        let before = bits.0[word as usize % BLOCK_WORDS].fetch_or(mask, Ordering::AcqRel);
        if before != 0 {
            // Whoever marked the word first leads the summary to it, and to this mark too.
            return;
        }
        fence_after_rmw();
        let bit = 1 << (block % 64);
        // A look first: it is mostly set, and its line then stays shared among the markers.
        if summary.load(Ordering::Relaxed) & bit == 0 {
            summary.fetch_or(bit, Ordering::AcqRel);
        }
    }

    /// Whether a page is marked.
    #[must_use]
    pub fn is_marked(&self, page: u64) -> bool {
        self.blocks.get((page / BLOCK_PAGES) as usize).is_some_and(|block| {
            let word = block.0[page as usize / 64 % BLOCK_WORDS].load(Ordering::Acquire);
            word >> (page % 64) & 1 == 1
        })
    }

    /// Whether nothing may be marked. A mark that is just being made may not count yet.
    #[must_use]
    pub fn is_clear(&self) -> bool {
        self.summary.iter().all(|word| word.load(Ordering::Relaxed) == 0)
    }

    /// Takes all marks, word by word, and hands on each block of 512 pages that has any. A mark that is
    /// made meanwhile is in this one or in the next.
    #[inline]
    pub fn take(&self, mut found: impl FnMut(usize, &[u64; BLOCK_WORDS])) {
        for (index, summary) in self.summary.iter().enumerate() {
            if summary.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut held = summary.swap(0, Ordering::AcqRel);
            fence_after_rmw();
            while held != 0 {
                let block = index * 64 + held.trailing_zeros() as usize;
                held &= held - 1;
                found(block, &self.blocks[block].take());
            }
        }
    }

    /// Takes all marks into a bitmap of the same pages.
    pub fn take_into(&self, pages: &mut PageBitmap) {
        self.take(|block, words| pages.or_block(block, words));
    }

    /// The same as the published calls do it, which knew no summary: every word is looked at.
    pub fn copy_out(&self, pages: &mut PageBitmap) {
        // Else the summary would lead to blocks that are clear.
        self.summary.iter().for_each(|summary| drop_marks(summary));
        fence_after_rmw();
        for (block, bits) in self.blocks.iter().enumerate() {
            let words = bits.take();
            if words != [0; BLOCK_WORDS] {
                pages.or_block(block, &words);
            }
        }
    }

    /// Pages that it covers.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages
    }
}
