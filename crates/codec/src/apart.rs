//! Decodes a frame of pages without guest memory, for readers of recordings. Every check that needs
//! no other page is done. Deltas are checked only if their base pages are known.

use vmferry_memory::{PAGE_SIZE, SlotId, page_hash, zero_page_hash};
use vmferry_wire::{Encoding, FrameHeader, FrameKind, Run, RunTable, WireError};

use crate::decode::{Decoder, check_sum, delta_error, unpack};
use crate::delta::{apply_delta, check_all_read, take_base_sum};
use crate::error::CodecError;
use crate::received_frame::Frame;

/// Longer runs of zero pages are counted but not hashed. A frame of this release has at most 128
/// pages; a few bytes of a forged run table could otherwise cost days of hashing.
const MOST_ZERO_PAGES: u32 = 512;

/// What is known of a page before a frame changes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base<'a> {
    /// Nothing: the page has not been seen.
    Unknown,
    /// Its hash. The page was seen, but its content is no longer kept.
    Hash(u64),
    /// Its content, and the hash of the content.
    Content(&'a [u8; PAGE_SIZE], u64),
}

/// A page of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageFound<'a> {
    /// A zero page.
    Zero,
    /// A page with content.
    Content(&'a [u8; PAGE_SIZE]),
    /// A delta against an unknown page. The new content is unknown too.
    Unknown,
}

/// A store of the pages that were seen.
pub trait Pages {
    /// What is known of a page.
    fn base(&self, slot: SlotId, page: u64) -> Base<'_>;

    /// Reports a decoded page; `hash` is the hash of its content. Pages are reported as soon as
    /// they are decoded, even if the rest of the frame fails.
    fn found(&mut self, slot: SlotId, page: u64, content: PageFound<'_>, hash: Option<u64>);
}

/// Counts of what a frame contains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Apart {
    /// Pages by encoding: zero, raw, packed, delta.
    pub pages: [u64; 4],
    /// Pages that could not be checked: deltas against unknown pages, and very long runs of zero
    /// pages.
    pub unchecked: u64,
    /// Length of the packed part before compression, in bytes.
    pub unpacked_bytes: u64,
}

impl Decoder {
    /// Decodes a frame of pages and compares all content sums that can be computed. `slot_pages` is
    /// the slot's length, if it is known.
    ///
    /// # Errors
    /// A frame that breaks a rule or is damaged.
    ///
    /// # Panics
    /// If only the head of the frame was read.
    pub fn decode_apart(
        &mut self,
        frame: &Frame,
        slot_pages: Option<u64>,
        pages: &mut dyn Pages,
    ) -> Result<Apart, CodecError> {
        let Some(header) = frame.header().filter(|header| header.kind == FrameKind::Pages) else {
            let text = "something else where pages are due".to_owned();
            return Err(WireError::BadFrame(text).into());
        };
        let slot = header.slot;
        let longest = u64::MAX / PAGE_SIZE as u64;
        let table = RunTable::parse(header, frame.table(header), slot_pages.unwrap_or(longest))?;
        let (mut raw, packed) = frame.raw_and_packed(header);
        let unpacked = unpack(&mut self.decompressors, &mut self.unpacked, header, &table, packed)?;
        let mut found = Apart { unpacked_bytes: unpacked.len() as u64, ..Apart::default() };
        let (mut packed, mut deltas) = unpacked.split_at(table.packed_page_bytes());
        let hashes = &mut self.page_hashes;
        for run in table.runs() {
            hashes.clear();
            found.pages[run.encoding as usize] += u64::from(run.pages);
            let from = match run.encoding {
                Encoding::Zero if run.pages > MOST_ZERO_PAGES => {
                    found.unchecked += u64::from(run.pages);
                    continue;
                }
                Encoding::Zero => {
                    for page in run.range() {
                        let hash = zero_page_hash(slot, page);
                        hashes.push(hash);
                        pages.found(slot, page, PageFound::Zero, Some(hash));
                    }
                    check_sum(hashes, header, &run)?;
                    continue;
                }
                Encoding::Delta => {
                    let known = changed(&mut deltas, hashes, header, &run, pages)?;
                    if known {
                        check_sum(hashes, header, &run)?;
                    } else {
                        found.unchecked += u64::from(run.pages);
                    }
                    continue;
                }
                Encoding::Raw => &mut raw,
                Encoding::Packed => &mut packed,
            };
            let (content, rest) = from.split_at(run.content_bytes());
            *from = rest;
            for (page, content) in run.range().zip(content.as_chunks().0) {
                let hash = page_hash(content, slot, page);
                hashes.push(hash);
                pages.found(slot, page, PageFound::Content(content), Some(hash));
            }
            check_sum(hashes, header, &run)?;
        }
        check_all_read(deltas)?;
        Ok(found)
    }
}

/// Reads the records of a delta run, and computes its pages where their bases are known. Returns
/// whether all of them are.
fn changed(
    records: &mut &[u8],
    hashes: &mut Vec<u64>,
    header: &FrameHeader,
    run: &Run,
    pages: &mut dyn Pages,
) -> Result<bool, CodecError> {
    let (sequence, slot) = (header.sequence, header.slot);
    let expected = take_base_sum(records).map_err(delta_error(header, run.first))?;
    let (mut sum, mut all_hashes, mut all_content) = (0_u64, true, true);
    for page in run.range() {
        match pages.base(slot, page) {
            Base::Unknown => (all_hashes, all_content) = (false, false),
            Base::Hash(hash) => (sum, all_content) = (sum.wrapping_add(hash), false),
            Base::Content(_, hash) => sum = sum.wrapping_add(hash),
        }
    }
    if all_hashes && sum != expected {
        let (page, pages) = (run.first, run.pages);
        return Err(CodecError::DeltaBase { sequence, slot, page, pages, expected, found: sum });
    }
    for page in run.range() {
        let mut content = [0; PAGE_SIZE];
        let known = match pages.base(slot, page) {
            Base::Content(base, _) => {
                content = *base;
                true
            }
            _ => false,
        };
        // If the base is unknown, the records are still read, because the records of other pages
        // follow.
        apply_delta(records, &mut content).map_err(delta_error(header, page))?;
        if known {
            let hash = page_hash(&content, slot, page);
            hashes.push(hash);
            pages.found(slot, page, PageFound::Content(&content), Some(hash));
        } else {
            pages.found(slot, page, PageFound::Unknown, None);
        }
    }
    Ok(all_content)
}
