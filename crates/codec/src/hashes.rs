//! The hash of every page as last sent or last placed, and the sum of all hashes.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};

use vmferry_memory::{GuestMemory, PageRun, SlotId};
use zerocopy::FromZeros;

/// One 64-bit hash per page, 0 for a page that was never recorded, and the wrapping sum of all.
///
/// The hashes are zeroed memory from the system, which takes memory only where pages are recorded,
/// so a huge and mostly empty guest stays cheap. Lanes record disjoint pages concurrently.
#[derive(Debug)]
pub struct PageHashes {
    slots: Vec<Vec<AtomicU64>>,
    sum: AtomicU64,
}

/// How the pages of a frame change the sum. The changes of a frame are accumulated and added once,
/// to avoid contention between lanes for the sum's cache line.
#[derive(Debug, Default)]
#[must_use = "the sum is wrong until the change is added"]
pub struct SumChange(u64);

impl PageHashes {
    /// Hashes for this memory, with no page recorded.
    #[must_use]
    pub fn for_memory(memory: &GuestMemory) -> Self {
        let slot = |pages: u64| {
            // This fails only for a length beyond the address space, and the memory itself is
            // mapped.
            AtomicU64::new_vec_zeroed(pages as usize).unwrap_or_default()
        };
        Self {
            slots: memory.slots().iter().map(|memory| slot(memory.pages())).collect(),
            sum: AtomicU64::new(0),
        }
    }

    /// A page's hash, if it was ever recorded.
    #[must_use]
    pub fn get(&self, slot: SlotId, page: u64) -> Option<u64> {
        self.at(slot, page).map(|hash| hash.load(Ordering::Relaxed)).filter(|hash| *hash != 0)
    }

    /// Whether a page was ever recorded.
    #[must_use]
    pub fn knows(&self, slot: SlotId, page: u64) -> bool {
        self.get(slot, page).is_some()
    }

    /// Replaces a page's hash, and returns the previous one if the page was ever recorded. The
    /// caller [adds](Self::add) the change to the sum.
    pub fn replace(
        &self,
        slot: SlotId,
        page: u64,
        hash: u64,
        change: &mut SumChange,
    ) -> Option<NonZeroU64> {
        let previous = self.at(slot, page).map_or(0, |at| at.swap(hash, Ordering::Relaxed));
        change.0 = change.0.wrapping_add(hash).wrapping_sub(previous);
        NonZeroU64::new(previous)
    }

    /// Adds a change to the sum.
    pub fn add(&self, change: SumChange) {
        // Relaxed is enough: before the sum is read, a channel or a lock has synchronized the
        // reader with all lanes.
        self.sum.fetch_add(change.0, Ordering::Relaxed);
    }

    /// Forgets these pages, as if they had never been recorded.
    pub fn forget(&self, run: PageRun) {
        let mut change = SumChange::default();
        for page in run.first..run.first + run.pages {
            self.replace(run.slot, page, 0, &mut change);
        }
        self.add(change);
    }

    /// The digest: the wrapping sum of all hashes.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.sum.load(Ordering::Relaxed)
    }

    fn at(&self, slot: SlotId, page: u64) -> Option<&AtomicU64> {
        self.slots.get(usize::from(slot.0))?.get(page as usize)
    }
}

#[cfg(test)]
mod tests {
    use vmferry_memory::{MemoryKind, SlotLayout};

    use super::*;

    #[test]
    fn sum_covers_the_last_hashes() {
        let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: 4 }];
        let memory = GuestMemory::allocate(&layout, MemoryKind::Private).unwrap();
        let hashes = PageHashes::for_memory(&memory);
        assert!(!hashes.knows(SlotId(0), 1));
        let mut change = SumChange::default();
        assert_eq!(hashes.replace(SlotId(0), 1, 100, &mut change), None);
        assert_eq!(hashes.replace(SlotId(0), 2, u64::MAX, &mut change), None);
        assert_eq!(hashes.replace(SlotId(0), 1, 7, &mut change), NonZeroU64::new(100));
        hashes.add(change);
        assert_eq!(hashes.sum(), 7_u64.wrapping_add(u64::MAX));
        assert!(hashes.knows(SlotId(0), 1));
        assert!(!hashes.knows(SlotId(0), 9));
        hashes.forget(PageRun { slot: SlotId(0), first: 2, pages: 2 });
        assert_eq!(hashes.sum(), 7);
        assert!(!hashes.knows(SlotId(0), 2));
        assert!(!hashes.knows(SlotId(1), 0));
    }
}
