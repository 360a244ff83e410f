//! The data a kernel works on: the words to decode, and a buffer for the positions that it finds.
//!
//! `unsafe` here reads positions of a batch that have been written.

use std::mem::MaybeUninit;

use super::{BLOCK_WORDS, WORD_BITS};

/// Capacity of a batch in positions: one block and 64 more. A larger batch does not decode faster,
/// and it makes the iterator more expensive to move.
pub(super) const ROOM: usize = BLOCK_ROOM + 64;

/// A kernel may write up to this number of positions beyond the last valid one.
pub(super) const WINDOW: usize = 64;

/// Maximum number of positions that a block adds, plus those that a kernel writes beyond them.
const BLOCK_ROOM: usize = BLOCK_WORDS * WORD_BITS as usize + WINDOW;

/// Maximum distance of a block from the batch's base, in bits, at which all positions of the block
/// still fit into 16 bits.
const REACH: u64 = (1 << 16) - 2 * BLOCK_WORDS as u64 * WORD_BITS;

/// The current position of a traversal.
#[derive(Debug)]
pub(super) struct Cursor<'a> {
    /// The words up to the end of the current range.
    pub(super) words: &'a [u64],
    pub(super) all: &'a [u64],
    /// Index of the next word to decode.
    pub(super) next: usize,
    /// The last bit before `next`: 1 if a run is open there.
    pub(super) carry: u64,
}

/// Positions of transitions, in order.
#[derive(Debug)]
pub(super) struct Batch {
    /// The bit that positions are relative to.
    pub(super) base: u64,
    /// Number of positions that have been written.
    pub(super) filled: usize,
    /// Uninitialized at first, because initializing costs more than traversing a small bitmap.
    positions: [MaybeUninit<u16>; ROOM],
}

impl Batch {
    pub(super) fn new() -> Self {
        Self { base: 0, filled: 0, positions: [MaybeUninit::uninit(); ROOM] }
    }

    /// Where to write the positions of the block that begins at this bit, and the offset to add to
    /// them. `None` if the batch has no room for a whole block.
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
    /// `count` positions have been written, from the first one of the slice that
    /// [`room_at`](Self::room_at) returned.
    #[inline(always)]
    pub(super) unsafe fn wrote(&mut self, count: usize) {
        self.filled += count;
    }

    #[inline(always)]
    pub(super) fn from(&self, at: usize) -> &[u16] {
        let written = &self.positions[at..self.filled];
        // SAFETY: positions below `filled` have been written: only `wrote` raises `filled`, and its
        // caller guarantees it. Both types have the same layout.
        unsafe { &*(std::ptr::from_ref(written) as *const [u16]) }
    }
}
