//! A bitmap in which threads mark pages while another thread takes the marks.
//!
//! Like `vmferry_memory::PageBitmap` it has a summary, so that taking from a clean bitmap costs
//! nothing: one bit for a group of eight blocks, 4,096 pages. A finer summary would cost the
//! writers more after each harvest, when all of them set its bits again and contend for its cache
//! lines.
//!
//! A mark sets the page's bit first and then the summary's bit. Taking takes the summary first and
//! then the words. With a full fence in between on both sides, either the taker sees the page's
//! bit, or the writer sees that the summary was taken and sets it again. So no mark stays in a word
//! that no summary bit covers.

use std::sync::atomic::Ordering;

use vmferry_memory::PageBitmap;
use vmferry_memory::traverse::{BLOCK_PAGES, BLOCK_WORDS};

use super::sync::{AtomicU64, fence_after_rmw};

/// Number of blocks that one bit of the summary covers.
const GROUP_BLOCKS: usize = 8;

/// A cache line of bits, so that one mark or one take touches one line.
#[repr(align(64))]
#[derive(Debug)]
struct Block([AtomicU64; BLOCK_WORDS]);

impl Block {
    /// Which words are not zero: bit `w` for word `w`. An exchange costs as much as ten loads. All
    /// loads precede the first exchange, so a branch is mispredicted at most once per block.
    #[inline]
    fn marked(&self) -> u32 {
        let words = self.0.iter().enumerate();
        words.fold(0, |marked, (index, bits)| {
            marked | u32::from(bits.load(Ordering::Relaxed) != 0) << index
        })
    }

    /// Takes the words that are `marked`.
    #[inline]
    fn take(&self, mut marked: u32) -> [u64; BLOCK_WORDS] {
        let mut words = [0; BLOCK_WORDS];
        while marked != 0 {
            let index = marked.trailing_zeros() as usize % BLOCK_WORDS;
            marked &= marked - 1;
            words[index] = self.0[index].swap(0, Ordering::AcqRel);
        }
        words
    }
}

#[inline]
fn take_blocks<'a>(
    blocks: impl Iterator<Item = (usize, &'a Block)>,
    found: &mut impl FnMut(usize, &[u64; BLOCK_WORDS]),
) {
    for (index, block) in blocks {
        let marked = block.marked();
        if marked != 0 {
            found(index, &block.take(marked));
        }
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
    /// Bit `b` of word `s` is group `64 * s + b`.
    summary: Box<[AtomicU64]>,
    pages: u64,
}

impl Marks {
    /// Marks for `pages` pages, with no page marked.
    #[must_use]
    pub fn new(pages: u64) -> Self {
        let blocks = pages.div_ceil(BLOCK_PAGES);
        let block = |_| Block(std::array::from_fn(|_| AtomicU64::new(0)));
        let groups = blocks.div_ceil(GROUP_BLOCKS as u64);
        let summary = (0..groups.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Self { blocks: (0..blocks).map(block).collect(), summary, pages }
    }

    /// Marks a page. A page beyond the end is ignored.
    #[inline]
    pub fn mark(&self, page: u64) {
        self.mark_in_word(page / 64, 1 << (page % 64));
    }

    /// Marks the pages from `first` to `last`. Pages beyond the end are ignored.
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
        let Some(bits) = self.blocks.get(block) else { return };
        // Release: the thread that takes the mark sees the write that preceded it. The result is
        // not used, so this is a single instruction on x86.
        bits.0[word as usize % BLOCK_WORDS].fetch_or(mask, Ordering::AcqRel);
        fence_after_rmw();
        let group = block / GROUP_BLOCKS;
        let Some(summary) = self.summary.get(group / 64) else { return };
        let bit = 1 << (group % 64);
        // Loads first: the bit is usually set, and the cache line then stays shared among the
        // writers.
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

    /// Whether no page is marked. A mark in progress may be missed.
    #[must_use]
    pub fn is_clear(&self) -> bool {
        self.summary.iter().all(|word| word.load(Ordering::Relaxed) == 0)
    }

    /// Takes all marks, word by word, and calls `found` with each block of 512 pages that has any.
    /// A concurrent mark is in this take or in the next one.
    #[inline]
    pub fn take(&self, mut found: impl FnMut(usize, &[u64; BLOCK_WORDS])) {
        for (index, summary) in self.summary.iter().enumerate() {
            if summary.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut held = summary.swap(0, Ordering::AcqRel);
            fence_after_rmw();
            while held != 0 {
                let first = (index * 64 + held.trailing_zeros() as usize) * GROUP_BLOCKS;
                held &= held - 1;
                let blocks = self.blocks.iter().enumerate().skip(first).take(GROUP_BLOCKS);
                take_blocks(blocks, &mut found);
            }
        }
    }

    /// Takes all marks into a bitmap of the same length.
    pub fn take_into(&self, pages: &mut PageBitmap) {
        self.take(|block, words| pages.or_block(block, words));
    }

    /// Takes all marks as the published calls do, which have no summary: every word is read.
    pub fn copy_out(&self, pages: &mut PageBitmap) {
        // Otherwise the summary would cover blocks that are clear.
        self.summary.iter().for_each(drop_marks);
        fence_after_rmw();
        let mut found = |block, words: &_| pages.or_block(block, words);
        take_blocks(self.blocks.iter().enumerate(), &mut found);
    }

    /// Number of pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages
    }
}
