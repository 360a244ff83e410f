//! Guest memory, as live migration needs it.
//!
//! In go the memory slots of a VMM (rust-vmm's `vm-memory`, or any mapping); out come pages:
//! copied out of live memory once, copied in, tested for zero, hashed, and *found*, because most
//! pages of a guest were never populated and must not be read, sent or faulted in. Which pages
//! are meant is always said by a [`PageSet`], one [`PageBitmap`] per slot, traversed by machine
//! word.
//!
//! Addresses: a page is named by its slot and its index within the slot, in units of
//! [`PAGE_SIZE`] bytes. Guest-physical addresses ([`Gpa`]) are bytes. Nothing here knows a log, a
//! socket or a hypervisor.
//!
//! `unsafe` is confined to `copy` (raw copies between slots and buffers), `slots` (the promise that
//! a mapping is valid), `discard` (one `madvise`), `guest_bytes` (buffers that core dumps leave
//! out), `pagemap` (one ioctl) and `traverse` (instructions found at run time, and the positions
//! that they have written).

mod bitmap;
mod copy;
mod discard;
mod error;
mod guest_bytes;
mod hash;
mod huge;
mod map;
pub mod pagemap;
mod populated;
mod room;
mod set;
mod sink;
mod slots;
pub mod traverse;
mod units;

pub use bitmap::{Held, PageBitmap};
pub use error::MemoryError;
pub use guest_bytes::GuestBytes;
pub use hash::{
    WholeHash, is_zero, page_hash, stream_hash, whole_hash, whole_hash_except, zero_page_hash,
};
pub use map::{MemoryKind, map_slots};
pub use populated::data_extents;
pub use room::{Place, Room, Shortage};
pub use set::PageSet;
pub use sink::PageSink;
pub use slots::{Backing, GuestMemory, Slot};
pub use units::{Gpa, PAGE_SHIFT, PAGE_SIZE, PageRun, SlotId, SlotLayout};
