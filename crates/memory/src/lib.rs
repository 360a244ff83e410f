//! Guest memory for live migration.
//!
//! The input is the memory slots of a VMM (rust-vmm's `vm-memory`, or any mapping). This crate
//! finds the populated pages, copies pages out of live memory and into it, tests them for zero, and
//! hashes them. Most pages of a guest were never populated; they must not be read, sent or faulted
//! in. A set of pages is always a [`PageSet`]: one [`PageBitmap`] per slot, traversed by machine
//! word.
//!
//! Addresses: a page is named by its slot and its index within the slot, in units of [`PAGE_SIZE`]
//! bytes. Guest-physical addresses ([`Gpa`]) are in bytes. This crate does not depend on a dirty
//! log, a socket or a hypervisor.
//!
//! `unsafe` is confined to `copy` (raw copies between slots and buffers), `slots` (the promise that
//! a mapping is valid), `discard` (one `madvise`), `guest_bytes` (buffers excluded from core
//! dumps), `pagemap` and `userfaultfd` (ioctls), `present` (one system call) and `traverse`
//! (instructions detected at run time, and reads of the positions they have written).

mod bitmap;
mod copy;
mod discard;
mod error;
mod guest_bytes;
mod hash;
mod huge;
mod layout;
mod map;
pub mod pagemap;
mod place;
mod populated;
mod present;
mod room;
mod set;
mod sink;
mod slots;
pub mod traverse;
mod units;
pub mod userfaultfd;

pub use bitmap::{Held, PageBitmap};
pub use error::MemoryError;
pub use guest_bytes::GuestBytes;
pub use hash::{
    WholeHash, is_zero, page_hash, stream_hash, whole_hash, whole_hash_except, zero_page_hash,
};
pub use huge::huge_page_bytes;
pub use map::{MemoryKind, map_slots};
pub use place::Place;
pub use populated::data_extents;
pub use room::{Room, Shortage};
pub use set::PageSet;
pub use sink::PageSink;
pub use slots::{Backing, GuestMemory, Slot};
pub use units::{Gpa, PAGE_SHIFT, PAGE_SIZE, PageRun, SlotId, SlotLayout};
