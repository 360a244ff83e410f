//! Traversal of bitmaps: from words to runs of consecutive set bits.
//!
//! One core serves every bitmap, whether it came from KVM (flat: every word is read) or is a
//! `PageBitmap` (with a summary: only blocks that may have set bits are read). It works on
//! *transitions*, the bits in which a word differs from itself shifted by one. Their positions are
//! alternately the beginnings and ends of runs. Words without a transition, all clear or all set,
//! are skipped at memory speed. The positions in other words are written without a branch per bit,
//! because mispredicted branches dominate the time with scattered pages.
//!
//! The kernel that writes the positions is chosen at run time: AVX-512 (VBMI2), AVX2 and BMI, or
//! with what every machine has.

mod batch;
mod decode;
mod kernel;

pub use decode::{FlatRuns, Runs};
pub use kernel::Kernel;
pub use kernel::count;

#[cfg(test)]
mod tests;

/// Number of bits in a word.
pub const WORD_BITS: u64 = 64;

/// Number of words in a block: 64 bytes, a cache line.
pub const BLOCK_WORDS: usize = 8;

/// Number of pages in a block: 512, which is 2 MiB of the guest.
pub const BLOCK_PAGES: u64 = WORD_BITS * BLOCK_WORDS as u64;

/// The runs of set bits of a flat bitmap, as (first, count), in order. Bit `b` of word `w` has
/// number `64 * w + b`.
#[must_use]
pub fn flat_runs(words: &[u64]) -> FlatRuns<'_> {
    flat_runs_with(Kernel::best(), words)
}

/// As [`flat_runs`], decoded with the given kernel, for comparison.
#[must_use]
pub fn flat_runs_with(kernel: Kernel, words: &[u64]) -> FlatRuns<'_> {
    Runs::new(kernel, words, std::iter::once(0..words.len()))
}

/// Index of the first word at or after `from` that is not zero, or the length if there is none.
#[must_use]
pub fn next_nonzero(words: &[u64], from: usize) -> usize {
    next_other(words, from, 0)
}

/// Index of the first word at or after `from` that is not `same`, or the length if there is none.
pub(crate) fn next_other(words: &[u64], from: usize, same: u64) -> usize {
    // The first word is usually enough, so it is tested before a kernel is called.
    match words.get(from) {
        Some(word) if *word == same => kernel::skip(Kernel::best(), words, from, same),
        Some(_) => from,
        None => words.len(),
    }
}
