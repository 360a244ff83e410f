//! Why a frame cannot be placed.

use vmferry_memory::{MemoryError, SlotId};
use vmferry_wire::WireError;

use crate::decompress::DecompressError;
use crate::delta::DeltaError;

/// Why a frame cannot be placed.
#[derive(Debug, thiserror::Error)]
pub enum CodecError {
    /// The frame breaks the protocol.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The packed part cannot be decompressed to the expected length.
    #[error("frame {sequence}: page {page} of {slot} and those behind it can't be decompressed")]
    Unpack {
        /// The frame's number on its lane.
        sequence: u64,
        /// The slot.
        slot: SlotId,
        /// The first packed page.
        page: u64,
        /// The error of the decompressor.
        #[source]
        source: DecompressError,
    },
    /// A delta cannot be decoded.
    #[error("frame {sequence}: the changes of page {page} of {slot} are damaged")]
    Delta {
        /// The frame's number on its lane.
        sequence: u64,
        /// The slot.
        slot: SlotId,
        /// The page.
        page: u64,
        /// The error in the delta.
        #[source]
        source: DeltaError,
    },
    /// The pages at the destination are not the base of the deltas.
    #[error(
        "frame {sequence} changes {pages} pages from page {page} of {slot} that are not here: they \
         hash to {found:#018x}, the source changed {expected:#018x}"
    )]
    DeltaBase {
        /// The frame's number on its lane.
        sequence: u64,
        /// The slot.
        slot: SlotId,
        /// First page of the run.
        page: u64,
        /// Number of pages in the run.
        pages: u32,
        /// Sum of the hashes of the source's base pages.
        expected: u64,
        /// Sum of the hashes of the pages at the destination.
        found: u64,
    },
    /// The decoded pages are not the pages that were sent.
    #[error(
        "frame {sequence}: {pages} pages from page {page} of {slot} hash to {found:#018x}, the \
         source sent {expected:#018x}"
    )]
    ContentSum {
        /// The frame's number on its lane.
        sequence: u64,
        /// The slot.
        slot: SlotId,
        /// First page of the run.
        page: u64,
        /// Number of pages in the run.
        pages: u32,
        /// The sum that the source sent.
        expected: u64,
        /// The sum of the decoded pages.
        found: u64,
    },
    /// A slot that the guest does not have. The frame is at fault, not the memory.
    #[error("frame {sequence} is for {slot}, and the guest has {slots} slots")]
    NoSuchSlot {
        /// The frame's number on its lane.
        sequence: u64,
        /// The slot.
        slot: SlotId,
        /// Number of slots of the guest.
        slots: usize,
    },
    /// Pages that do not belong on the frame's lane.
    #[error("frame {sequence} holds page {page} of {slot}, which does not belong on this lane")]
    Stray {
        /// The frame's number on its lane.
        sequence: u64,
        /// The slot.
        slot: SlotId,
        /// First page of the stray run.
        page: u64,
    },
    /// The guest memory does not accept the pages.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The packed part of a stream piece cannot be decompressed to the expected length.
    #[error("frame {sequence}: the stream's bytes from {offset} on can't be decompressed")]
    PieceUnpack {
        /// The frame's number on its lane.
        sequence: u64,
        /// Offset of the piece in its stream.
        offset: u64,
        /// The error of the decompressor.
        #[source]
        source: DecompressError,
    },
    /// A delta against a kept page cannot be decoded.
    #[error("frame {sequence}: the changes of the page that is kept in entry {entry} are damaged")]
    PieceDelta {
        /// The frame's number on its lane.
        sequence: u64,
        /// The entry.
        entry: u32,
        /// The error in the delta.
        #[source]
        source: DeltaError,
    },
    /// A delta against a page that was never kept.
    #[error("frame {sequence} changes the page in entry {entry}, and none is kept there")]
    NotKept {
        /// The frame's number on its lane.
        sequence: u64,
        /// The entry.
        entry: u32,
    },
    /// The decoded piece of a stream is not the piece that was sent.
    #[error(
        "frame {sequence}: {bytes} bytes of the stream from {offset} on hash to {found:#018x}, the \
         source sent {expected:#018x}"
    )]
    PieceHash {
        /// The frame's number on its lane.
        sequence: u64,
        /// Offset of the piece in its stream.
        offset: u64,
        /// Its length.
        bytes: usize,
        /// The hash that the source sent.
        expected: u64,
        /// The hash of the decoded piece.
        found: u64,
    },
}
