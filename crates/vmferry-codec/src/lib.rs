//! Page encodings: how guest pages become the payload of a frame, and pages again.
//!
//! The source's [`Encoder`] works on a copy of the pages: it tests for zero, hashes, makes deltas of
//! pages that it still has as they were sent ([`HotPages`]), compresses what looks as if it shrinks, and
//! builds the frame's header and run table around it; pages that go raw are sent from the copy. The
//! destination's [`Decoder`] decodes and checks a whole frame beside the guest's memory before it places a
//! single page, but for frames of raw pages, which are received in place and checked there. Both note the hash of each page in [`PageHashes`], whose sum is the digest that the two
//! sides compare before the handover.
//!
//! Of a VMM's own migration stream a frame carries a piece. [`StreamEncoder`] and [`StreamDecoder`] give the same bytes
//! at the other end, whatever they are; pages that were recognised in it are encoded like others, with deltas against
//! pages that both sides keep.
//!
//! Nothing here allocates once its buffers are made, and nothing knows where pages come from.

#![forbid(unsafe_code)]

mod apart;
mod compress;
mod decode;
mod decompress;
mod delta;
mod direct;
mod encode;
mod entropy;
mod frame;
mod hashes;
mod hot_pages;
mod method;
#[cfg(test)]
mod samples;
mod stream;

pub use apart::{Apart, Base, PageFound, Pages};
pub use compress::{Compress, CompressError, Compressors};
pub use decode::{CodecError, Decoder, Frame, PlacedPages, ReadError};
pub use decompress::{DecompressError, Decompressors};
pub use delta::{DeltaError, apply_delta, encode_delta};
pub use direct::is_direct;
pub use encode::{Batch, Choice, DeltaUse, EncodeError, Encoder, FrameCounts};
pub use entropy::looks_random;
pub use frame::EncodedFrame;
pub use hashes::PageHashes;
pub use hot_pages::{Delta, Exchange, HotPages};
pub use method::{Method, MethodError};
pub use stream::{Kept, PageMark, Piece, PieceBytes, StreamDecoder, StreamEncoder};
