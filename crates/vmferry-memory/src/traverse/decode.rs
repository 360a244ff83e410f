//! The core: an iterator over the runs of some ranges of words.
//!
//! `unsafe` here reads positions of a batch that have been written.

use std::iter::Once;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::kernel::{self, Kernel};
use super::{BLOCK_WORDS, WORD_BITS};

/// Positions that a batch has room for: a block's, and some before it. More does not decode faster, and an
/// iterator is moved with its batch.
pub(super) const ROOM: usize = BLOCK_ROOM + 64;

/// A kernel may write so many positions beyond the last that counts.
pub(super) const WINDOW: usize = 64;

/// Positions that a block adds at most, and what a kernel writes beyond.
const BLOCK_ROOM: usize = BLOCK_WORDS * WORD_BITS as usize + WINDOW;

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
    base: u64,
    /// So many positions have been written.
    filled: usize,
    /// Not set to anything at first: traversing a small bitmap costs less than that would.
    positions: [MaybeUninit<u16>; ROOM],
}

impl Batch {
    fn new() -> Self {
        Self { base: 0, filled: 0, positions: [MaybeUninit::uninit(); ROOM] }
    }

    /// Where a block's positions go that begins at this bit, and what to add to them; `None` if the batch
    /// has no room for all.
    #[inline(always)]
    pub(super) fn room_at(&mut self, bit: u64) -> Option<(&mut [MaybeUninit<u16>], u16)> {
        if self.filled == 0 {
            self.base = bit;
        }
        if self.filled > ROOM - BLOCK_ROOM || bit - self.base > REACH {
            return None;
        }
        Some((&mut self.positions[self.filled..], (bit - self.base) as u16))
    }

    /// Counts positions as written.
    ///
    /// # Safety
    /// So many have been written to where [`room_at`](Self::room_at) said, from its first on.
    #[inline(always)]
    pub(super) unsafe fn wrote(&mut self, count: usize) {
        self.filled += count;
    }

    #[inline(always)]
    fn from(&self, at: usize) -> &[u16] {
        let written = &self.positions[at..self.filled];
        // SAFETY: positions below `filled` have been written: nothing but `wrote`, whose caller says
        // so, raises it. The types have one layout.
        unsafe { &*(std::ptr::from_ref(written) as *const [u16]) }
    }
}

impl<'a, R: Iterator<Item = Range<usize>>> Runs<'a, R> {
    #[inline]
    pub(crate) fn new(kernel: Kernel, words: &'a [u64], ranges: R) -> Self {
        let cursor = Cursor { words: &[], all: words, next: 0, carry: 0 };
        Self { kernel, ranges, at: 0, batch: Batch::new(), cursor }
    }

    /// Decodes until the batch is full or nothing is left; `false` if there is nothing.
    fn refill(&mut self) -> bool {
        self.at = 0;
        self.batch.filled = 0;
        loop {
            if self.cursor.next < self.cursor.words.len() {
                kernel::fill(self.kernel, &mut self.cursor, &mut self.batch);
                if self.cursor.next < self.cursor.words.len() {
                    break;
                }
            }
            if self.cursor.carry == 1 {
                // A run that reaches the range's end ends there.
                let Some((room, position)) =
                    self.batch.room_at(self.cursor.next as u64 * WORD_BITS)
                else {
                    break;
                };
                room[0].write(position);
                // SAFETY: one has been written.
                unsafe { self.batch.wrote(1) };
                self.cursor.carry = 0;
            }
            let Some(range) = self.ranges.next() else { break };
            self.cursor.next = range.start;
            self.cursor.words = &self.cursor.all[..range.end];
        }
        self.batch.filled > 0
    }

    /// The run whose begin is the last position of the batch.
    fn across_batches(&mut self) -> Option<(u64, u64)> {
        let first = self.batch.base + u64::from(*self.batch.from(self.at).first()?);
        // What is open is closed by a later position, at the latest at the range's end.
        self.refill().then(|| {
            self.at = 1;
            let end = self.batch.base + u64::from(self.batch.from(0)[0]);
            (first, end - first)
        })
    }
}

impl<R: Iterator<Item = Range<usize>>> Iterator for Runs<'_, R> {
    type Item = (u64, u64);

    #[inline]
    fn next(&mut self) -> Option<(u64, u64)> {
        loop {
            match *self.batch.from(self.at) {
                [begin, end, ..] => {
                    self.at += 2;
                    return Some((self.batch.base + u64::from(begin), u64::from(end - begin)));
                }
                [_] => return self.across_batches(),
                [] => {
                    if !self.refill() {
                        return None;
                    }
                }
            }
        }
    }

    fn fold<B, F: FnMut(B, (u64, u64)) -> B>(mut self, init: B, mut f: F) -> B {
        let mut folded = init;
        loop {
            let base = self.batch.base;
            let (pairs, open) = self.batch.from(self.at).as_chunks::<2>();
            for [begin, end] in pairs {
                folded = f(folded, (base + u64::from(*begin), u64::from(end - begin)));
            }
            if open.is_empty() {
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
