//! A set of pages of a guest: one bitmap per slot.

use crate::bitmap::PageBitmap;
use crate::slots::GuestMemory;
use crate::units::{PageRun, SlotId, SlotLayout};

/// One [`PageBitmap`] for each slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageSet {
    slots: Vec<PageBitmap>,
}

impl PageSet {
    /// An empty set for slots of this layout.
    #[must_use]
    pub fn for_layout(layout: &[SlotLayout]) -> Self {
        Self { slots: layout.iter().map(|slot| PageBitmap::new(slot.pages)).collect() }
    }

    /// An empty set for this memory.
    #[must_use]
    pub fn for_memory(memory: &GuestMemory) -> Self {
        Self { slots: memory.slots().iter().map(|slot| PageBitmap::new(slot.pages())).collect() }
    }

    /// The bitmap of a slot.
    ///
    /// # Panics
    /// If the set has no such slot.
    #[must_use]
    pub fn bitmap(&self, slot: SlotId) -> &PageBitmap {
        &self.slots[usize::from(slot.0)]
    }

    /// The bitmap of a slot, mutable.
    ///
    /// # Panics
    /// If the set has no such slot.
    pub fn bitmap_mut(&mut self, slot: SlotId) -> &mut PageBitmap {
        &mut self.slots[usize::from(slot.0)]
    }

    /// Sets exactly the pages that are in both `one` and `other`, which have the same layout.
    pub fn set_to_intersection(&mut self, one: &Self, other: &Self) {
        for ((slot, one), other) in self.slots.iter_mut().zip(&one.slots).zip(&other.slots) {
            slot.set_to_intersection(one, other);
        }
    }

    /// The slots with their bitmaps, in order.
    pub fn iter(&self) -> impl Iterator<Item = (SlotId, &PageBitmap)> {
        self.slots.iter().enumerate().map(|(slot, bitmap)| (SlotId(slot as u16), bitmap))
    }

    /// All runs of consecutive set pages, slot after slot.
    pub fn runs(&self) -> impl Iterator<Item = PageRun> + '_ {
        self.iter().flat_map(|(slot, bitmap)| {
            bitmap.runs().map(move |(first, pages)| PageRun { slot, first, pages })
        })
    }

    /// Number of pages in the set.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.slots.iter().map(PageBitmap::count).sum()
    }

    /// Whether no page is in the set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slots.iter().all(PageBitmap::is_empty)
    }

    /// Adds the pages of a set of the same layout.
    pub fn union_with(&mut self, other: &Self) {
        for (ours, theirs) in self.slots.iter_mut().zip(&other.slots) {
            ours.union_with(theirs);
        }
    }

    /// Removes the pages of a set of the same layout.
    pub fn subtract(&mut self, other: &Self) {
        for (ours, theirs) in self.slots.iter_mut().zip(&other.slots) {
            ours.subtract(theirs);
        }
    }

    /// Removes all pages.
    pub fn clear_all(&mut self) {
        self.slots.iter_mut().for_each(PageBitmap::clear_all);
    }
}
