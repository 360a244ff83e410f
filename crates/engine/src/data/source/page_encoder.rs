//! Encoding a batch of pages: each page is read once, and a frame is made of the copy.

use std::sync::Arc;

use vmferry_codec::{
    Choice, Compressors, EncodedFrame, Encoder, FrameCounts, HotPages, PageHashes,
};
use vmferry_memory::{GuestMemory, MemoryError, PAGE_SIZE, PageRun, PageSet, SlotId};

use super::lane::plan::PageBatch;
use crate::error::MigrateError;
use crate::link::channel_name;
use crate::rounds::hinted::Hinted;

/// Makes frames from the guest's memory. A worker keeps its encoder for the whole migration.
pub struct PageEncoder {
    memory: GuestMemory,
    hashes: Arc<PageHashes>,
    encoder: Encoder,
}

impl PageEncoder {
    /// `hashes` are those of the pages as last sent. `hot` has copies of some pages and is shared
    /// by all workers.
    #[must_use]
    pub fn new(
        memory: GuestMemory,
        hashes: Arc<PageHashes>,
        compressors: Compressors,
        hot: Arc<HotPages>,
    ) -> Self {
        Self { memory, hashes, encoder: Encoder::new(compressors, hot) }
    }

    /// Checks that all pages of a run exist.
    ///
    /// # Errors
    /// A run that is not within its slot.
    pub fn check(&self, run: PageRun) -> Result<(), MemoryError> {
        self.memory.check_run(run).map(|_| ())
    }

    /// Makes the frame of a batch of lane `lane`.
    ///
    /// # Errors
    /// Errors of the memory or of the compressor.
    pub fn encode(
        &mut self,
        lane: u8,
        batch: &PageBatch,
        frame: &mut EncodedFrame,
        choice: Choice,
    ) -> Result<FrameCounts, MigrateError> {
        let known = Known { zero: batch.zero.as_deref(), poisoned: batch.poisoned.as_deref() };
        let batch = batch.as_batch();
        // The only access to live memory. Everything after this uses the copy.
        let mut copy = frame.pages_mut(batch.pages.len());
        for run in runs(batch.slot, batch.pages) {
            let (into, rest) = copy.split_at_mut(run.pages as usize * PAGE_SIZE);
            self.copy_run(run, known, into)?;
            copy = rest;
        }
        self.encoder.encode(frame, batch, &self.hashes, choice).map_err(|error| {
            MigrateError::Compression { channel: channel_name(Some(lane)), source: error.into() }
        })
    }

    fn copy_run(
        &self,
        run: PageRun,
        known: Known<'_>,
        copy: &mut [u8],
    ) -> Result<(), MigrateError> {
        if known.is_nothing() {
            return Ok(self.memory.copy_out(run, copy)?);
        }
        for (page, copy) in (run.first..).zip(copy.chunks_exact_mut(PAGE_SIZE)) {
            match known.content(run.slot, page) {
                Some(word) => {
                    let (words, _) = copy.as_chunks_mut::<4>();
                    words.fill(word.to_le_bytes());
                }
                None => self.memory.copy_out(PageRun { first: page, pages: 1, ..run }, copy)?,
            }
        }
        Ok(())
    }
}

/// What is known about pages without reading them.
#[derive(Clone, Copy)]
struct Known<'a> {
    zero: Option<&'a PageSet>,
    poisoned: Option<&'a Hinted>,
}

impl Known<'_> {
    fn is_nothing(&self) -> bool {
        self.zero.is_none() && self.poisoned.is_none()
    }

    /// The known value of each 32-bit word of a page.
    fn content(&self, slot: SlotId, page: u64) -> Option<u32> {
        if self.zero.is_some_and(|zero| zero.bitmap(slot).is_set(page)) {
            return Some(0);
        }
        self.poisoned.filter(|hinted| hinted.is_set(slot, page))?.poison()
    }
}

/// Adjacent page numbers as runs.
fn runs(slot: SlotId, pages: &[u64]) -> impl Iterator<Item = PageRun> + '_ {
    pages.chunk_by(|a, b| a + 1 == *b).map(move |run| PageRun {
        slot,
        first: run[0],
        pages: run.len() as u64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_join_adjacent_pages() {
        let slot = SlotId(1);
        let found: Vec<_> =
            runs(slot, &[3, 4, 5, 9, 11, 12]).map(|run| (run.first, run.pages)).collect();
        assert_eq!(found, [(3, 3), (9, 1), (11, 2)]);
    }
}
