//! The memory blocks of a guest, by QEMU's names.

use vmferry_memory::SlotId;

/// A guest's memory blocks, in the order of its description's layout.
#[derive(Clone, Debug, Default)]
pub struct Blocks {
    blocks: Vec<(Box<[u8]>, Known)>,
    largest: u64,
}

/// A block of the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Known {
    /// Its slot in the layout.
    pub slot: SlotId,
    /// Its length in pages.
    pub pages: u64,
}

impl Blocks {
    /// Takes QEMU's name and the length in pages of each block, in slot order. Pages of any other
    /// block are not found.
    pub fn new<N: AsRef<str>>(layout: impl IntoIterator<Item = (N, u64)>) -> Self {
        let slots = (0..=u16::MAX).map(SlotId);
        let blocks: Vec<_> = layout
            .into_iter()
            .zip(slots)
            .map(|((name, pages), slot)| (name.as_ref().as_bytes().into(), Known { slot, pages }))
            .collect();
        let largest = blocks.iter().map(|(_, known)| known.pages).max().unwrap_or(0);
        Self { blocks, largest }
    }

    /// Finds a block by its name. There are few, and QEMU sends a name only when the block changes.
    pub(super) fn find(&self, name: &[u8]) -> Option<Known> {
        self.blocks.iter().find(|(known, _)| **known == *name).map(|&(_, known)| known)
    }

    /// The length in pages of the largest block.
    pub(super) fn largest(&self) -> u64 {
        self.largest
    }
}

impl Known {
    /// The page at an offset, if a whole page begins there.
    pub fn page(self, offset: u64) -> Option<u64> {
        let page = offset / super::PAGE as u64;
        (offset.is_multiple_of(super::PAGE as u64) && page < self.pages).then_some(page)
    }
}
