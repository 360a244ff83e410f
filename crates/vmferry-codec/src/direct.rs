//! Raw pages from the channel straight into the guest's memory.
//!
//! Of a frame that holds nothing but raw pages and zeros only the head is read beside the guest's memory. Everything
//! that it says is checked, then its pages are received where they belong, without a buffer between, and hashed there
//! while they are in the cache. What of such a frame is damaged is found when it stands in the memory already, so a
//! bad sum must be the end of the guest there; and a frame of which a part came must come again whole. Pages that are
//! changed by deltas are still those that a whole frame brought: the hash of a page is noted only then.

use vmferry_memory::{GuestMemory, PAGE_SIZE, PageRun, PageSink, page_hash, zero_page_hash};
use vmferry_wire::{Encoding, FrameHeader, FrameKind, Run};

use crate::decode::{
    CodecError, Decoder, Frame, PlacedPages, check_sum, checked_table, place_zeros, record,
};
use crate::hashes::PageHashes;

/// Whether the pages of a frame can be [received in place](Decoder::begin_direct): none of them is packed or
/// changed, and there is one at least.
#[must_use]
pub fn is_direct(header: &FrameHeader) -> bool {
    header.kind == FrameKind::Pages && header.packed_bytes == 0 && header.delta_bytes == 0
}

impl Decoder {
    /// Checks the head of a frame that [can be received in place](is_direct), and returns where its payload goes.
    /// `belongs` says whether a run may come in this frame. Nothing is written yet.
    ///
    /// # Errors
    /// A head that breaks a rule, or no memory left.
    pub fn begin_direct<'m>(
        &mut self,
        frame: &Frame,
        memory: &'m GuestMemory,
        hashes: &PageHashes,
        belongs: impl Fn(&Run) -> bool,
    ) -> Result<PageSink<'m>, CodecError> {
        let mut sink = memory.sink();
        let Some(header) = frame.header().filter(|header| is_direct(header)) else {
            return Ok(sink);
        };
        let table = checked_table(frame, header, memory, belongs)?;
        for run in table.runs().filter(|run| run.encoding == Encoding::Raw) {
            let pages = run.in_slot(header.slot);
            // As in `place`: both ways are right for any page.
            if !hashes.knows(header.slot, run.first) {
                memory.prepare_new(pages)?;
            }
            sink.push(pages)?;
        }
        Ok(sink)
    }

    /// Checks the pages of the frame, which were all received, places those of zeros, and records the hashes.
    ///
    /// # Errors
    /// Pages that are not those that were sent: they stand in the memory then, and the guest must not run there.
    pub fn finish_direct(
        &mut self,
        frame: &Frame,
        memory: &GuestMemory,
        hashes: &PageHashes,
    ) -> Result<PlacedPages, CodecError> {
        let Some(header) = frame.header().filter(|header| is_direct(header)) else {
            return Ok(PlacedPages::default());
        };
        let slot = header.slot;
        let table = checked_table(frame, header, memory, |_| true)?;
        self.page_hashes.clear();
        self.page.extend_to(PAGE_SIZE);
        for run in table.runs() {
            let from = self.page_hashes.len();
            for page in run.range() {
                self.page_hashes.push(if run.encoding == Encoding::Zero {
                    zero_page_hash(slot, page)
                } else {
                    memory.copy_out(PageRun { slot, first: page, pages: 1 }, &mut self.page)?;
                    page_hash(&self.page, slot, page)
                });
            }
            check_sum(&self.page_hashes[from..], header, &run)?;
        }
        for run in table.runs().filter(|run| run.encoding == Encoding::Zero) {
            place_zeros(slot, run, memory, hashes)?;
        }
        Ok(record(&self.page_hashes, header, &table, hashes))
    }
}

#[cfg(test)]
#[path = "direct_tests.rs"]
mod tests;
