//! How far a lane is in a round: the blocks that are planned, and those that are write-protected
//! again.

use std::time::{Duration, Instant};

use vmferry_memory::traverse::{BLOCK_PAGES, BLOCK_WORDS};
use vmferry_memory::{PageBitmap, SlotId};

use super::RoundOrder;
use crate::error::MigrateError;

/// The most words of the bitmap that one call re-arms: 128 MiB of the guest.
pub(super) const REARM_WORDS: usize = 512;

/// Selects the blocks of a lane.
#[derive(Clone, Copy)]
pub(super) struct Share {
    pub(super) lane: usize,
    pub(super) lanes: usize,
}

/// A lane's progress in a round.
pub(super) struct RoundProgress {
    pub(super) order: RoundOrder,
    share: Share,
    /// Whether all other pages are planned and the deferred ones follow.
    sends_deferred: bool,
    pub(super) slot: SlotId,
    /// Blocks of the slot below this are planned.
    block: usize,
    /// Blocks of the slot below this are write-protected again.
    rearmed_to: usize,
    pub(super) rearm_time: Duration,
    /// Pages hinted free.
    pub(super) free_pages: u64,
}

/// Pages of one block.
pub(super) struct BlockPages {
    /// Number of the block's first page.
    pub(super) base: u64,
    pub(super) words: [u64; BLOCK_WORDS],
}

impl RoundProgress {
    /// The beginning of a round.
    pub(super) fn new(order: RoundOrder, share: Share) -> Self {
        Self {
            order,
            share,
            sends_deferred: false,
            slot: SlotId(0),
            block: 0,
            rearmed_to: 0,
            rearm_time: Duration::ZERO,
            free_pages: 0,
        }
    }

    /// Whether the next pages may yet be hinted free.
    pub(super) fn must_wait(&self) -> bool {
        self.sends_deferred && self.order.hinted.as_ref().is_some_and(|hinted| hinted.is_held())
    }

    /// The slot's next block with pages to send. They are write-protected again, about
    /// `rearm_pages` at a time. `buffer` keeps the memory for that.
    pub(super) fn next_block(
        &mut self,
        rearm_pages: u64,
        buffer: &mut Vec<u64>,
    ) -> Result<Option<BlockPages>, MigrateError> {
        while let Some(block) = self.find_block() {
            self.block = block + 1;
            let mut words = self.words(block);
            if let Some(hinted) = &self.order.hinted {
                self.free_pages += hinted.take_out(self.slot, block, &mut words);
            }
            if words == [0; BLOCK_WORDS] {
                continue;
            }
            if self.order.rearm_first && block >= self.rearmed_to {
                self.rearm_from(block, rearm_pages, buffer)?;
            }
            return Ok(Some(BlockPages { base: block as u64 * BLOCK_PAGES, words }));
        }
        Ok(None)
    }

    /// Moves to the next slot, or to the deferred pages. Returns whether there is any.
    pub(super) fn next_slot(&mut self) -> bool {
        (self.block, self.rearmed_to) = (0, 0);
        let slots = self.order.pages.iter().count();
        if usize::from(self.slot.0) + 1 < slots {
            self.slot.0 += 1;
        } else if !self.sends_deferred && self.order.deferred.is_some() {
            self.sends_deferred = true;
            self.slot = SlotId(0);
        } else {
            return false;
        }
        true
    }

    /// The slot's next block of this lane that may have pages.
    fn find_block(&self) -> Option<usize> {
        let bitmap = self.bitmap()?;
        let mut block = bitmap.next_block(self.block)?;
        while !self.share.owns(block) {
            block = bitmap.next_block(block + 1)?;
        }
        Some(block)
    }

    /// The pages of a block to send now.
    fn words(&self, block: usize) -> [u64; BLOCK_WORDS] {
        let mut words = self.bitmap().map_or([0; BLOCK_WORDS], |bitmap| *bitmap.block(block));
        if let Some(deferred) = &self.order.deferred {
            let flip = if self.sends_deferred { 0 } else { u64::MAX };
            for (word, deferred) in words.iter_mut().zip(deferred.bitmap(self.slot).block(block)) {
                *word &= deferred ^ flip;
            }
        }
        words
    }

    /// Write-protects about `pages` pages of this lane again, from block `first` on. `words` is a
    /// buffer.
    fn rearm_from(
        &mut self,
        first: usize,
        pages: u64,
        words: &mut Vec<u64>,
    ) -> Result<(), MigrateError> {
        words.clear();
        let (mut block, mut found) = (first, 0);
        let slot_words = self.bitmap().map_or(0, |bitmap| bitmap.words().len());
        let most = slot_words.min(first * BLOCK_WORDS + REARM_WORDS);
        while block * BLOCK_WORDS < most && found < pages {
            // Pages of other lanes are protected by those lanes.
            let own = if self.share.owns(block) { self.words(block) } else { [0; BLOCK_WORDS] };
            found += own.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
            words.extend_from_slice(&own);
            block += 1;
        }
        words.truncate(slot_words - first * BLOCK_WORDS);
        let begun = Instant::now();
        self.order.log.rearm(self.slot, first * BLOCK_WORDS, words)?;
        self.rearm_time += begun.elapsed();
        self.rearmed_to = block;
        Ok(())
    }

    fn bitmap(&self) -> Option<&PageBitmap> {
        self.order.pages.iter().nth(self.slot.0.into()).map(|(_, bitmap)| bitmap)
    }
}

impl Share {
    fn owns(self, block: usize) -> bool {
        block % self.lanes == self.lane
    }
}
