//! A page encoded as the bytes that changed since it was last sent.
//!
//! A record is the number of patches, followed by the patches in ascending order. A patch is the
//! distance of its beginning from the end of the previous patch (from the start of the page, for
//! the first), its length minus one, and its bytes. Numbers are little-endian base 128 in one or
//! two bytes. The record of an unchanged page is a single 0 byte.

use vmferry_memory::{GuestBytes, PAGE_SIZE};
use vmferry_wire::WireError;

/// Length of the base sum of a delta run in bytes.
pub(crate) const BASE_SUM_BYTES: usize = size_of::<u64>();

/// Bytes that are compared at once: one bit of a word for each byte.
const BLOCK: usize = 64;

/// Maximum length of a gap of unchanged bytes that is sent instead of starting a new patch. The
/// header of the new patch would take at least two bytes.
const MERGED_GAP: usize = 2;

/// Appends to `into` the record that turns `base` into `page`, both of [`PAGE_SIZE`] bytes. Returns
/// `false` and appends nothing if the record would be longer than `limit` bytes, or if a page has
/// another size. It never needs room for more than `limit` bytes.
pub fn encode_delta(base: &[u8], page: &[u8], into: &mut GuestBytes, limit: usize) -> bool {
    if base.len() != PAGE_SIZE || page.len() != PAGE_SIZE || limit == 0 {
        return false;
    }
    let begin = into.len();
    let end = begin.saturating_add(limit);
    let mut record = Record { page, into, end, patches: 0, at: 0 };
    // One byte for the number of patches. A second byte is inserted if the number needs two.
    record.into.extend_from_slice(&[0]);
    let made = record.add_all(base);
    let patches = record.patches;
    let two = patches >= 0x80;
    if !made || into.len() + usize::from(two) > end {
        into.truncate(begin);
        return false;
    }
    let (count, bytes) = varint(patches);
    if two {
        let made = into.len();
        into.extend_from_slice(&[0]);
        into.copy_within(begin + 1..made, begin + 2);
    }
    into[begin..begin + bytes].copy_from_slice(&count[..bytes]);
    true
}

struct Record<'a> {
    page: &'a [u8],
    into: &'a mut GuestBytes,
    /// Maximum length of `into`.
    end: usize,
    patches: usize,
    /// End of the last patch in the page.
    at: usize,
}

impl Record<'_> {
    fn add_all(&mut self, base: &[u8]) -> bool {
        let (old, _) = base.as_chunks::<BLOCK>();
        let (new, _) = self.page.as_chunks::<BLOCK>();
        // The last patch, which may still be extended.
        let mut patch: Option<(usize, usize)> = None;
        for (index, (old, new)) in old.iter().zip(new).enumerate() {
            if old == new {
                continue;
            }
            let mut changed = changed_bytes(old, new);
            while changed != 0 {
                let first = changed.trailing_zeros();
                let bytes = (changed >> first).trailing_ones();
                // Adding the lowest bit of a run of ones carries through the run and clears it.
                changed &= changed.wrapping_add(1 << first);
                let begin = index * BLOCK + first as usize;
                let end = begin + bytes as usize;
                match &mut patch {
                    Some((_, last)) if begin - *last <= MERGED_GAP => *last = end,
                    _ => {
                        if patch.replace((begin, end)).is_some_and(|patch| !self.add(patch)) {
                            return false;
                        }
                    }
                }
            }
        }
        patch.is_none_or(|patch| self.add(patch))
    }

    fn add(&mut self, (begin, end): (usize, usize)) -> bool {
        let (gap, gap_bytes) = varint(begin - self.at);
        let (length, length_bytes) = varint(end - begin - 1);
        if self.into.len() + gap_bytes + length_bytes + (end - begin) > self.end {
            return false;
        }
        self.into.extend_from_slice(&gap[..gap_bytes]);
        self.into.extend_from_slice(&length[..length_bytes]);
        self.into.extend_from_slice(&self.page[begin..end]);
        self.patches += 1;
        self.at = end;
        true
    }
}

/// One bit for each byte, set if it differs. The lowest bit is the first byte.
fn changed_bytes(old: &[u8; BLOCK], new: &[u8; BLOCK]) -> u64 {
    const LOW_BITS: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    let (old, _) = old.as_chunks::<8>();
    let (new, _) = new.as_chunks::<8>();
    old.iter().zip(new).enumerate().fold(0, |changed, (index, (old, new))| {
        let differs = u64::from_le_bytes(*old) ^ u64::from_le_bytes(*new);
        // The highest bit of each byte is set if the byte is not zero, ...
        let high = (((differs & LOW_BITS) + LOW_BITS) | differs) & !LOW_BITS;
        // ... and these bits are gathered in the highest byte, each at a different position and
        // without a carry.
        let bits = (high >> 7).wrapping_mul(0x0102_0408_1020_4080) >> 56;
        changed | bits << (8 * index)
    })
}

/// The encoding of a number below 2^14, and its length in bytes.
fn varint(number: usize) -> ([u8; 2], usize) {
    let low = (number & 0x7f) as u8;
    if number < 0x80 { ([low, 0], 1) } else { ([low | 0x80, (number >> 7) as u8], 2) }
}

/// An invalid record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeltaError {
    /// The records end within this one.
    #[error("a delta is cut: {needed} more bytes needed, {left} left")]
    Cut {
        /// Number of bytes needed.
        needed: usize,
        /// Number of bytes left.
        left: usize,
    },
    /// A number whose encoding is longer than allowed or longer than necessary.
    #[error("a number of a delta takes more bytes than it needs: {low:#04x} {high:#04x}")]
    Overlong {
        /// Its first byte.
        low: u8,
        /// Its second byte.
        high: u8,
    },
    /// A patch that ends outside the page.
    #[error("a patch of a delta, {bytes} bytes at {at}, ends outside the page")]
    OutOfPage {
        /// Offset of the patch in the page, in bytes.
        at: usize,
        /// Its length in bytes.
        bytes: usize,
    },
}

/// Reads one record from the front of `records` and applies it to `page`, [`PAGE_SIZE`] bytes that
/// hold the base.
///
/// # Errors
/// There is no valid record at the front. `records` is unchanged, but some patches may have been
/// applied, so `page` holds neither version.
pub fn apply_delta(records: &mut &[u8], page: &mut [u8]) -> Result<(), DeltaError> {
    let mut rest = *records;
    let mut at = 0;
    for _ in 0..take_varint(&mut rest)? {
        let begin = at + take_varint(&mut rest)?;
        let bytes = take_varint(&mut rest)? + 1;
        at = begin + bytes;
        let place = page.get_mut(begin..at);
        let place = place.ok_or(DeltaError::OutOfPage { at: begin, bytes })?;
        let cut = DeltaError::Cut { needed: bytes, left: rest.len() };
        let (new, after) = rest.split_at_checked(bytes).ok_or(cut)?;
        place.copy_from_slice(new);
        rest = after;
    }
    *records = rest;
    Ok(())
}

/// Takes the sum of the base pages' hashes, which precedes a run's records.
pub(crate) fn take_base_sum(records: &mut &[u8]) -> Result<u64, DeltaError> {
    let cut = DeltaError::Cut { needed: BASE_SUM_BYTES, left: records.len() };
    let (sum, rest) = records.split_first_chunk().ok_or(cut)?;
    *records = rest;
    Ok(u64::from_le_bytes(*sum))
}

/// Checks that all records of a frame were read.
pub(crate) fn check_all_read(records: &[u8]) -> Result<(), WireError> {
    if records.is_empty() {
        return Ok(());
    }
    let left = records.len();
    Err(WireError::BadFrame(format!("{left} bytes are left over after all deltas")))
}

fn take_varint(rest: &mut &[u8]) -> Result<usize, DeltaError> {
    let cut = DeltaError::Cut { needed: 1, left: 0 };
    let (low, after) = rest.split_first().ok_or(cut)?;
    *rest = after;
    if *low < 0x80 {
        return Ok(usize::from(*low));
    }
    let (high, after) = rest.split_first().ok_or(cut)?;
    *rest = after;
    if *high == 0 || *high >= 0x80 {
        return Err(DeltaError::Overlong { low: *low, high: *high });
    }
    Ok(usize::from(*low & 0x7f) | usize::from(*high) << 7)
}

#[cfg(test)]
mod tests;
