//! Traversal of bitmaps: from words to runs of consecutive set bits.
//!
//! One core serves every bitmap, whether it came from KVM (flat: each word is looked at) or is kept
//! here (with a summary: only blocks that may hold anything are). It works on *transitions*, the bits
//! in which a word differs from itself shifted by one: their positions are where runs begin and end,
//! by turns. Words without a transition, all clear or all set alike, are skipped at the speed of memory,
//! and the positions in the others are written out without a branch for each bit: with scattered pages
//! it is mispredicted branches that cost the time.
//!
//! How the positions are written is chosen when it runs: with AVX-512 (VBMI2), with AVX2 and BMI, or
//! with what every machine has. [`baseline`] has the two published ways, to be compared with.

pub mod baseline;
mod decode;
mod kernel;

pub use decode::{FlatRuns, Runs};
pub use kernel::Kernel;
pub use kernel::count;

#[cfg(test)]
mod tests;

/// Bits of a word.
pub const WORD_BITS: u64 = 64;

/// Words of a block: 64 bytes, a cache line.
pub const BLOCK_WORDS: usize = 8;

/// Pages of a block: 512, so 2 MiB of the guest.
pub const BLOCK_PAGES: u64 = WORD_BITS * BLOCK_WORDS as u64;

/// The runs of set bits of a flat bitmap, as (first, count), in order. Bit `b` of word `w` is
/// `64 * w + b`.
#[must_use]
pub fn flat_runs(words: &[u64]) -> FlatRuns<'_> {
    flat_runs_with(Kernel::best(), words)
}

/// As [`flat_runs`], decoded in a chosen way, to compare them.
#[must_use]
pub fn flat_runs_with(kernel: Kernel, words: &[u64]) -> FlatRuns<'_> {
    Runs::new(kernel, words, std::iter::once(0..words.len()))
}

/// Index of the first word from `from` on that is not zero; the length if all are.
#[must_use]
pub fn next_nonzero(words: &[u64], from: usize) -> usize {
    next_other(words, from, 0)
}

/// Index of the first word from `from` on that is not `same`; the length if all are.
pub(crate) fn next_other(words: &[u64], from: usize, same: u64) -> usize {
    // Neighbours mostly decide it.
    match words.get(from) {
        Some(word) if *word == same => kernel::skip(Kernel::best(), words, from, same),
        Some(_) => from,
        None => words.len(),
    }
}
