//! The memory blocks of a guest, by QEMU's names.

use parking_lot::Mutex;
use vmferry_memory::SlotId;

/// The most blocks that are learned from a stream. A guest has about ten.
const MOST_LEARNED: usize = 256;

/// A guest's memory blocks, in the order of its description's layout.
#[derive(Debug, Default)]
pub struct Blocks {
    blocks: Vec<Block>,
    largest: u64,
    /// Blocks that the stream has named, if they are not known beforehand.
    learned: Option<Mutex<Vec<Block>>>,
}

#[derive(Debug)]
struct Block {
    name: Box<[u8]>,
    known: Known,
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
            .map(|((name, pages), slot)| Block {
                name: name.as_ref().as_bytes().into(),
                known: Known { slot, pages },
            })
            .collect();
        let largest = blocks.iter().map(|block| block.known.pages).max().unwrap_or(0);
        Self { blocks, largest, learned: None }
    }

    /// The blocks of a guest about which only its streams are known. Blocks are numbered in the
    /// order in which they are named, and their lengths stay unknown.
    #[must_use]
    pub fn learning() -> Self {
        Self { blocks: Vec::new(), largest: u64::MAX, learned: Some(Mutex::default()) }
    }

    /// Finds a block by its name. There are few, and QEMU sends a name only when the block changes.
    pub(super) fn find(&self, name: &[u8]) -> Option<Known> {
        let find = |blocks: &[Block]| {
            blocks.iter().find(|block| *block.name == *name).map(|block| block.known)
        };
        let Some(learned) = &self.learned else { return find(&self.blocks) };
        let mut learned = learned.lock();
        if let Some(known) = find(&learned) {
            return Some(known);
        }
        if learned.len() == MOST_LEARNED {
            return None;
        }
        let known = Known { slot: SlotId(learned.len() as u16), pages: u64::MAX };
        learned.push(Block { name: name.into(), known });
        Some(known)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_learned_in_order_and_bounded() {
        let blocks = Blocks::learning();
        let slot = |name: &str| blocks.find(name.as_bytes()).map(|known| known.slot.0);
        assert_eq!((slot("pc.ram"), slot("vga"), slot("pc.ram")), (Some(0), Some(1), Some(0)));
        for number in 2..MOST_LEARNED {
            assert_eq!(slot(&number.to_string()), Some(number as u16));
        }
        assert_eq!((slot("one more"), slot("vga")), (None, Some(1)));
    }
}
