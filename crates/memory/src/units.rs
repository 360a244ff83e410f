//! Pages, slots and addresses.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Bytes of a page. The dirty logs of x86-64 KVM and of userfaultfd use the same unit.
pub const PAGE_SIZE: usize = 1 << PAGE_SHIFT;

/// Number of address bits that select a byte within a page.
pub const PAGE_SHIFT: u32 = 12;

/// A guest-physical address in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gpa(pub u64);

impl fmt::Display for Gpa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// The number of a memory slot: 0, 1, 2 … in ascending order of guest-physical address.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct SlotId(pub u16);

impl fmt::Display for SlotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slot {}", self.0)
    }
}

/// The position of a slot in the guest. Both hosts must agree on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotLayout {
    /// The slot's number.
    pub slot: SlotId,
    /// Guest-physical address of its first byte, a multiple of [`PAGE_SIZE`].
    pub gpa: u64,
    /// Its length in pages.
    pub pages: u64,
}

/// Consecutive pages of one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// The slot.
    pub slot: SlotId,
    /// Index of the first page within the slot.
    pub first: u64,
    /// Number of pages.
    pub pages: u64,
}

impl fmt::Display for PageRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pages from page {} of {}", self.pages, self.first, self.slot)
    }
}
