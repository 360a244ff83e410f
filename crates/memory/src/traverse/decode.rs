//! The core: an iterator over the runs in ranges of words.
//!
use std::iter::Once;
use std::ops::Range;

use super::WORD_BITS;
use super::batch::{Batch, Cursor};
use super::kernel::{self, Kernel};

/// The runs of a flat bitmap; see [`super::flat_runs`].
pub type FlatRuns<'a> = Runs<'a, Once<Range<usize>>>;

/// Iterates runs of set bits as (first, count). `R` selects the words to decode: ascending ranges.
/// Two ranges must not be adjacent unless runs may be split at the boundary.
#[derive(Debug)]
pub struct Runs<'a, R> {
    kernel: Kernel,
    ranges: R,
    at: usize,
    batch: Batch,
    cursor: Cursor<'a>,
}

impl<'a, R: Iterator<Item = Range<usize>>> Runs<'a, R> {
    #[inline]
    pub(crate) fn new(kernel: Kernel, words: &'a [u64], ranges: R) -> Self {
        let cursor = Cursor { words: &[], all: words, next: 0, carry: 0 };
        Self { kernel, ranges, at: 0, batch: Batch::new(), cursor }
    }

    /// Decodes until the batch is full or no words are left. Returns `false` if nothing was
    /// decoded.
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
                // A run that reaches the end of the range ends there.
                let Some((room, position)) =
                    self.batch.room_at(self.cursor.next as u64 * WORD_BITS)
                else {
                    break;
                };
                room[0].write(position);
                // SAFETY: one position has been written.
                unsafe { self.batch.wrote(1) };
                self.cursor.carry = 0;
            }
            let Some(range) = self.ranges.next() else { break };
            self.cursor.next = range.start;
            self.cursor.words = &self.cursor.all[..range.end];
        }
        self.batch.filled > 0
    }

    /// The run that begins at the last position of the batch.
    fn across_batches(&mut self) -> Option<(u64, u64)> {
        let first = self.batch.base + u64::from(*self.batch.from(self.at).first()?);
        // An open run is closed by a later position, at the latest at the end of the range.
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
