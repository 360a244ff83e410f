//! Errors about guest memory.

use std::io;

use crate::place::{Bytes, Place};
use crate::units::{PageRun, SlotId};

/// An error about guest memory, with the slot or run that it concerns.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// A slot number that the memory does not have.
    #[error("there is no {slot}: this memory has {slots} slots")]
    NoSuchSlot {
        /// The requested number.
        slot: SlotId,
        /// Number of slots.
        slots: usize,
    },
    /// A run that reaches beyond its slot.
    #[error("{run} reach beyond the slot's end at page {pages}")]
    OutOfSlot {
        /// The run.
        run: PageRun,
        /// Pages in the slot.
        pages: u64,
    },
    /// A buffer whose length differs from the run's.
    #[error("a buffer of {bytes} bytes does not hold {run}")]
    BufferLength {
        /// The run.
        run: PageRun,
        /// Bytes in the buffer.
        bytes: usize,
    },
    /// The pages to receive are in too many separate pieces.
    #[error("pages in more than {most} places at once")]
    TooManyPieces {
        /// Maximum number of pieces.
        most: usize,
    },
    /// A guest-physical range that is not within one slot.
    #[error("no slot holds the {bytes} bytes at guest-physical {gpa:#x}")]
    NoMemoryAt {
        /// Guest-physical address of the first byte.
        gpa: u64,
        /// Length of the range.
        bytes: usize,
    },
    /// A layout that cannot be mapped.
    #[error("bad memory layout: {0}")]
    Layout(String),
    /// The system refused to map guest memory.
    #[error("mapping {bytes} bytes for {slot} failed")]
    Map {
        /// The slot.
        slot: SlotId,
        /// Its length.
        bytes: u64,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
    /// The host has too few huge pages.
    #[error(
        "memory from {slot} on needs {needed} huge pages of 2 MiB and the host has {unclaimed} to \
         give: reserve more with `sysctl vm.nr_hugepages={reserve}`, or choose another kind of \
         memory"
    )]
    HugePages {
        /// The slot that could not be mapped.
        slot: SlotId,
        /// Number of huge pages that this slot and the slots after it need.
        needed: u64,
        /// Number of huge pages that are free and not reserved.
        unclaimed: u64,
        /// Total number of huge pages that the host should have.
        reserve: u64,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
    /// Pages that must be missing are still there after they were freed.
    #[error(
        "the kernel does not free {pages} outdated pages: they are parts of huge pages that \
         something has pinned"
    )]
    NotFreed {
        /// Their number.
        pages: u64,
    },
    /// A page that was to be filled could not be allocated.
    #[error("no page could be had for {slot} of {}: {place} has {} \
             left", Bytes(*bytes), Bytes(*free_bytes))]
    NoRoom {
        /// The slot.
        slot: SlotId,
        /// Its length.
        bytes: u64,
        /// Where its pages are allocated from.
        place: Place,
        /// Bytes that are left there.
        free_bytes: u64,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
    /// The system refused an operation on a slot.
    #[error("{what} of {slot} failed")]
    Slot {
        /// The operation, such as `populating pages`.
        what: &'static str,
        /// The slot.
        slot: SlotId,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
    /// `/proc/self/pagemap` could not be opened or scanned.
    #[error("scanning the page tables failed")]
    Pagemap(#[source] io::Error),
}
