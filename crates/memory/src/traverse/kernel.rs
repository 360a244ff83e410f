//! The operations on words for each instruction set: one generic implementation, compiled for each
//! instruction set, and one step that uses an AVX-512 instruction.
//!
//! `unsafe` here calls functions that are compiled for instructions detected at run time.

use std::mem::MaybeUninit;

use super::batch::{Batch, Cursor, WINDOW};
use super::{BLOCK_WORDS, WORD_BITS};

/// Buffer for the positions of one word's bits.
type Window = [MaybeUninit<u16>; WINDOW];

/// A way to decode words, named by the instructions that it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Runs on every machine.
    Portable,
    /// AVX2 and BMI.
    Avx2,
    /// AVX-512 F, BW and VBMI2.
    Avx512,
}

impl Kernel {
    /// The kernels that this machine supports, the fastest last.
    #[must_use]
    pub fn available() -> Vec<Self> {
        [Self::Portable, Self::Avx2, Self::Avx512]
            .into_iter()
            .filter(|kernel| kernel.is_available())
            .collect()
    }

    /// The fastest kernel that this machine supports.
    #[must_use]
    #[inline]
    pub fn best() -> Self {
        if Self::Avx512.is_available() {
            Self::Avx512
        } else if Self::Avx2.is_available() {
            Self::Avx2
        } else {
            Self::Portable
        }
    }

    #[inline]
    fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("bmi1")
                    && is_x86_feature_detected!("popcnt")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vbmi2")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
        }
    }
}

/// Writes transitions from the cursor on until the batch is full or the words end.
pub(super) fn fill(kernel: Kernel, cursor: &mut Cursor<'_>, batch: &mut Batch) {
    match kernel {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the match guard has verified with `is_available` that the machine has the
        // instructions. It is checked here because a caller can construct any `Kernel`.
        Kernel::Avx512 if kernel.is_available() => unsafe { x86::fill_avx512(cursor, batch) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Kernel::Avx2 if kernel.is_available() => unsafe { x86::fill_avx2(cursor, batch) },
        // SAFETY: `put_by_bit` writes each position of the word's bits.
        _ => unsafe { fill_with(cursor, batch, put_by_bit) },
    }
}

/// Index of the first word at or after `from` that is not `same`, or the length if there is none.
pub(super) fn skip(kernel: Kernel, words: &[u64], from: usize, same: u64) -> usize {
    match kernel {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as in `fill`.
        Kernel::Avx512 if kernel.is_available() => unsafe { x86::skip_avx512(words, from, same) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as in `fill`.
        Kernel::Avx2 if kernel.is_available() => unsafe { x86::skip_avx2(words, from, same) },
        _ => skip_with(words, from, same),
    }
}

/// Number of set bits in all words.
#[must_use]
pub fn count(words: &[u64]) -> u64 {
    match Kernel::best() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `best` has verified that the machine has the instructions.
        Kernel::Avx512 | Kernel::Avx2 => unsafe { x86::count_avx2(words) },
        _ => count_with(words),
    }
}

#[inline(always)]
fn count_with(words: &[u64]) -> u64 {
    words.iter().map(|word| u64::from(word.count_ones())).sum()
}

/// Words that are tested together: eight cache lines, so that the branch costs little compared with
/// the loads.
const STRIDE: usize = 8 * BLOCK_WORDS;

#[inline(always)]
fn skip_with(words: &[u64], from: usize, same: u64) -> usize {
    let mut at = from;
    let differs = |words: &[u64]| words.iter().fold(0, |found, word| found | (word ^ same)) != 0;
    while let Some(stride) = words.get(at..).and_then(|rest| rest.first_chunk::<STRIDE>()) {
        if differs(stride) {
            break;
        }
        at += STRIDE;
    }
    while let Some(block) = words.get(at..).and_then(|rest| rest.first_chunk::<BLOCK_WORDS>()) {
        if differs(block) {
            break;
        }
        at += BLOCK_WORDS;
    }
    words[at..].iter().position(|word| *word != same).map_or(words.len(), |offset| at + offset)
}

/// The core's loop. `put` receives a word, the number of its set bits and an offset, and writes the
/// positions of the bits plus the offset into the window.
///
/// # Safety
/// `put` must write at least as many positions as the count that it receives.
#[inline(always)]
unsafe fn fill_with(
    cursor: &mut Cursor<'_>,
    batch: &mut Batch,
    put: impl Fn(u64, u32, u16, &mut Window),
) {
    let words = cursor.words;
    while cursor.next < words.len() {
        let rest = &words[cursor.next..];
        let block = rest.first_chunk::<BLOCK_WORDS>().map_or(rest, <[u64; BLOCK_WORDS]>::as_slice);
        let same = cursor.carry.wrapping_neg();
        if block.iter().fold(0, |found, word| found | (word ^ same)) == 0 {
            cursor.next = skip_with(words, cursor.next + block.len(), same);
            continue;
        }
        let Some((room, mut offset)) = batch.room_at(cursor.next as u64 * WORD_BITS) else {
            return;
        };
        let mut filled = 0;
        for &word in block {
            let transitions = word ^ (word << 1 | cursor.carry);
            cursor.carry = word >> 63;
            let count = transitions.count_ones();
            let Some(window) = room[filled..].first_chunk_mut::<WINDOW>() else {
                unreachable!("a batch has room for a block and a window")
            };
            put(transitions, count, offset, window);
            filled += count as usize;
            offset += WORD_BITS as u16;
        }
        // SAFETY: for each word, `put` has written `count` positions, directly after those of the
        // word before.
        unsafe { batch.wrote(filled) };
        cursor.next += block.len();
    }
}

/// Always writes four positions without a branch: most words of scattered pages have fewer.
#[inline(always)]
fn put_by_bit(bits: u64, count: u32, offset: u16, window: &mut Window) {
    let mut rest = bits;
    let mut put = |position: &mut MaybeUninit<u16>| {
        position.write(offset.wrapping_add(rest.trailing_zeros() as u16));
        rest &= rest.wrapping_sub(1);
    };
    window[..4].iter_mut().for_each(&mut put);
    window.iter_mut().take(count as usize).skip(4).for_each(put);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m512i, _mm512_add_epi16, _mm512_castsi512_si256, _mm512_cvtepu8_epi16,
        _mm512_extracti64x4_epi64, _mm512_loadu_si512, _mm512_maskz_compress_epi8,
        _mm512_set1_epi16, _mm512_storeu_si512,
    };

    use super::{Batch, Cursor, Window, count_with, fill_with, put_by_bit, skip_with};

    #[target_feature(enable = "avx2,bmi1,popcnt")]
    pub(super) fn count_avx2(words: &[u64]) -> u64 {
        count_with(words)
    }

    #[target_feature(enable = "avx2,bmi1,popcnt")]
    pub(super) fn skip_avx2(words: &[u64], from: usize, same: u64) -> usize {
        skip_with(words, from, same)
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,avx2,bmi1,popcnt")]
    pub(super) fn skip_avx512(words: &[u64], from: usize, same: u64) -> usize {
        skip_with(words, from, same)
    }

    #[target_feature(enable = "avx2,bmi1,popcnt")]
    pub(super) fn fill_avx2(cursor: &mut Cursor<'_>, batch: &mut Batch) {
        // SAFETY: `put_by_bit` writes each position of the word's bits.
        unsafe { fill_with(cursor, batch, put_by_bit) };
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,avx2,bmi1,popcnt")]
    pub(super) fn fill_avx512(cursor: &mut Cursor<'_>, batch: &mut Batch) {
        let put =
            |bits, count, offset, window: &mut Window| put_avx512(bits, count, offset, window);
        // SAFETY: `put_avx512` writes 32 positions, or all 64 if the word has more.
        unsafe { fill_with(cursor, batch, put) };
    }

    /// The indices 0 to 63 of a vector's bytes.
    static BYTES: [u8; 64] = {
        let mut bytes = [0; 64];
        let mut index = 0;
        while index < 64 {
            bytes[index] = index as u8;
            index += 1;
        }
        bytes
    };

    /// All positions of a word at once: the word's bits select from the numbers 0 to 63
    /// (`VPCOMPRESSB`, Intel SDM volume 2).
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi2")]
    fn put_avx512(bits: u64, count: u32, offset: u16, window: &mut Window) {
        let into = window.as_mut_ptr();
        // SAFETY: `BYTES` has the 64 bytes that are read. The window has 64 positions; each of the
        // two stores writes 32 of them.
        unsafe {
            let numbers = _mm512_loadu_si512(BYTES.as_ptr().cast());
            let chosen = _mm512_maskz_compress_epi8(bits, numbers);
            let offset = _mm512_set1_epi16(offset.cast_signed());
            let low = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(chosen));
            _mm512_storeu_si512(into.cast::<__m512i>(), _mm512_add_epi16(low, offset));
            if count > 32 {
                let high = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64::<1>(chosen));
                _mm512_storeu_si512(into.add(32).cast::<__m512i>(), _mm512_add_epi16(high, offset));
            }
        }
    }
}
