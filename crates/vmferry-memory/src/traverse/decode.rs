//! The core: an iterator over the runs of some ranges of words.

use std::iter::Once;
use std::ops::Range;

use super::kernel::{self, Kernel};
use super::{BLOCK_WORDS, WORD_BITS};

/// Positions that a batch has room for: those of one block of 512 bits, and what a kernel may write
/// beyond the last that counts.
pub(super) const ROOM: usize = 512 + 64 + WINDOW;

/// A kernel writes so many positions at once, whatever counts of them.
pub(super) const WINDOW: usize = 64;

/// Bits from the batch's base on that 16 bits can name, with room for the block that begins there.
const REACH: u64 = (1 << 16) - 2 * BLOCK_WORDS as u64 * WORD_BITS;

/// The runs of a flat bitmap; see [`super::flat_runs`].
pub type FlatRuns<'a> = Runs<'a, Once<Range<usize>>>;

/// Iterates runs of set bits as (first, count). `R` says which words are looked at: ranges, ascending,
/// none of which begins where the one before ends unless a run is to be cut there.
#[derive(Debug)]
pub struct Runs<'a, R> {
    kernel: Kernel,
    ranges: R,
    at: usize,
    batch: Batch,
    cursor: Cursor<'a>,
}

/// Where a traversal stands.
#[derive(Debug)]
pub(super) struct Cursor<'a> {
    /// The words up to the end of the present range.
    pub words: &'a [u64],
    all: &'a [u64],
    /// The next word to be looked at.
    pub next: usize,
    /// The last bit before it: whether a run is open there.
    pub carry: u64,
}

/// Positions of transitions, in order.
#[derive(Debug)]
pub(super) struct Batch {
    /// What the positions count from, in bits.
    pub base: u64,
    pub filled: usize,
    pub positions: [u16; ROOM],
}

impl Batch {
    /// Whether a block that begins at this bit still fits.
    #[inline(always)]
    pub(super) fn has_room_at(&self, bit: u64) -> bool {
        self.filled <= ROOM - WINDOW - 512 && bit - self.base <= REACH
    }
}

impl<'a, R: Iterator<Item = Range<usize>>> Runs<'a, R> {
    pub(crate) fn new(kernel: Kernel, words: &'a [u64], ranges: R) -> Self {
        let batch = Batch { base: 0, filled: 0, positions: [0; ROOM] };
        let cursor = Cursor { words: &[], all: words, next: 0, carry: 0 };
        Self { kernel, ranges, at: 0, batch, cursor }
    }

    /// Decodes until there is at least one position; `false` at the end.
    fn refill(&mut self) -> bool {
        self.at = 0;
        self.batch.filled = 0;
        loop {
            if self.cursor.next == self.cursor.words.len() {
                if self.cursor.carry == 1 {
                    // A run that reaches the range's end ends there.
                    self.cursor.carry = 0;
                    self.batch.base = self.cursor.next as u64 * WORD_BITS;
                    self.batch.positions[0] = 0;
                    self.batch.filled = 1;
                    return true;
                }
                let Some(range) = self.ranges.next() else { return false };
                self.cursor.next = range.start;
                self.cursor.words = &self.cursor.all[..range.end];
                continue;
            }
            kernel::fill(self.kernel, &mut self.cursor, &mut self.batch);
            if self.batch.filled > 0 {
                return true;
            }
        }
    }

    /// The run whose begin is the last position of the batch.
    fn across_batches(&mut self) -> Option<(u64, u64)> {
        let first = self.batch.base + u64::from(self.batch.positions[self.at]);
        // What is open is closed by a later position, at the latest at the range's end.
        self.refill().then(|| {
            self.at = 1;
            (first, self.batch.base + u64::from(self.batch.positions[0]) - first)
        })
    }
}

impl<R: Iterator<Item = Range<usize>>> Iterator for Runs<'_, R> {
    type Item = (u64, u64);

    #[inline]
    fn next(&mut self) -> Option<(u64, u64)> {
        loop {
            if let Some(&[begin, end]) = self.batch.positions[..self.batch.filled]
                .get(self.at..)
                .and_then(|rest| rest.first_chunk::<2>())
            {
                self.at += 2;
                return Some((self.batch.base + u64::from(begin), u64::from(end - begin)));
            }
            if self.at < self.batch.filled {
                return self.across_batches();
            }
            if !self.refill() {
                return None;
            }
        }
    }

    fn fold<B, F: FnMut(B, (u64, u64)) -> B>(mut self, init: B, mut f: F) -> B {
        let mut folded = init;
        loop {
            let base = self.batch.base;
            let (pairs, rest) = self.batch.positions[self.at..self.batch.filled].as_chunks::<2>();
            for [begin, end] in pairs {
                folded = f(folded, (base + u64::from(*begin), u64::from(end - begin)));
            }
            if rest.is_empty() {
                if !self.refill() {
                    return folded;
                }
            } else {
                self.at = self.batch.filled - 1;
                match self.across_batches() {
                    Some(run) => folded = f(folded, run),
                    None => return folded,
                }
            }
        }
    }
}
