//! Page encodings: guest pages to the payload of a frame, and back.
//!
//! The source's [`Encoder`] works on a copy of the pages. It tests them for zero, hashes them,
//! computes deltas of pages whose last sent version it holds ([`HotPages`]), compresses pages that
//! look compressible, and builds the frame's header and run table. Raw pages are sent from the
//! copy. The destination's [`Decoder`] decodes and checks a whole frame outside guest memory before
//! it places any page. Frames of raw pages are the exception: they are received in place and
//! checked there. Both sides record the hash of each page in [`PageHashes`]. Its sum is the digest
//! that the two sides compare before the handover.
//!
//! For a VMM's own migration stream, a frame contains a piece of the stream. [`StreamEncoder`] and
//! [`StreamDecoder`] reproduce the same bytes at the destination, whatever they are. Pages that
//! were recognized in a piece are encoded like others, with deltas against pages that both sides
//! keep.
//!
//! After the buffers are created, nothing here allocates. Nothing here knows where pages come from.

#![forbid(unsafe_code)]

mod apart;
mod compress;
mod decode;
mod decompress;
mod delta;
mod direct;
mod encode;
mod entropy;
mod error;
mod frame;
mod hashes;
mod hot_pages;
mod method;
mod received_frame;
#[cfg(test)]
mod samples;
mod stream;

pub use apart::{Apart, Base, PageFound, Pages};
pub use compress::{Compress, CompressError, Compressors};
pub use decode::{DecodedPages, Decoder, PlacedPages};
pub use decompress::{DecompressError, Decompressors};
pub use delta::{DeltaError, apply_delta, encode_delta};
pub use direct::is_direct;
pub use encode::{Batch, Choice, DeltaUse, EncodeError, Encoder, FrameCounts};
pub use entropy::looks_random;
pub use error::CodecError;
pub use frame::EncodedFrame;
pub use hashes::{PageHashes, SumChange};
pub use hot_pages::{Delta, Exchange, HotPages, PageVersion};
pub use method::{Method, MethodError};
pub use received_frame::{Frame, ReadError};
pub use stream::{Kept, PageMark, Piece, PieceBytes, StreamDecoder, StreamEncoder};
