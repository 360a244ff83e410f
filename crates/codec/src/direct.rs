//! Receiving raw pages from the channel directly into guest memory.
//!
//! If a frame has only raw pages and zero pages, only its head is read into a buffer. Everything in
//! the head is checked. Then the pages are received in place, without an intermediate buffer, and
//! hashed while they are in the cache. Damage to such a frame is found only after it is in guest
//! memory, so a bad sum makes the guest at the destination unusable, and a frame of which a part
//! was received must be sent again as a whole. The bases of deltas still come from complete frames
//! only, because a page's hash is recorded only after the whole frame was checked.

use vmferry_memory::{GuestMemory, PAGE_SIZE, PageRun, PageSink, page_hash, zero_page_hash};
use vmferry_wire::{Encoding, FrameHeader, FrameKind, MAX_FRAME_CONTENT_PAGES, Run};

use crate::decode::{Decoder, PlacedPages, check_sum, checked_table, place_zeros, record};
use crate::error::CodecError;
use crate::hashes::PageHashes;
use crate::received_frame::Frame;

/// No frame has more pieces than a sink takes.
const _: () = assert!(MAX_FRAME_CONTENT_PAGES <= PageSink::MOST_PIECES as u64);

/// Whether the pages of a frame can be [received in place](Decoder::begin_direct): it has pages,
/// and none of them is packed or a delta.
#[must_use]
pub fn is_direct(header: &FrameHeader) -> bool {
    header.kind == FrameKind::Pages && header.packed_bytes == 0 && header.delta_bytes == 0
}

impl Decoder {
    /// Checks the head of a frame that [can be received in place](is_direct), and returns the sink
    /// for its payload. `belongs` returns whether a run may be in this frame. Nothing is written
    /// yet.
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
            // As in `place`: populating first or not is correct for any page.
            if !hashes.knows(header.slot, run.first) {
                memory.prepare_new(pages)?;
            }
            sink.push(pages)?;
        }
        Ok(sink)
    }

    /// Checks the pages of the frame, which must all have been received, places its zero pages, and
    /// records the hashes.
    ///
    /// # Errors
    /// The pages are not the pages that were sent. They are in guest memory already, and the guest
    /// must not run there.
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
mod tests;
