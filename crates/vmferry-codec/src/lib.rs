//! Page encodings: how guest pages become the payload of a frame, and pages again.
//!
//! The source's [`Encoder`] works on a copy of the pages: it tests for zero, hashes, and builds
//! the frame's header and run table around the copy, which is sent as it is. The destination's
//! [`Decoder`] checks a whole frame in a scratch buffer before it places a single page. Both note
//! the hash of each page in [`PageHashes`], whose sum is the digest that the two sides compare
//! before the hand-over.
//!
//! Nothing here allocates once its buffers are made, and nothing knows where pages come from.

#![forbid(unsafe_code)]

mod compress;
mod decode;
mod decompress;
mod delta;
mod encode;
mod entropy;
mod hashes;
mod hot_pages;
mod method;
#[cfg(test)]
mod samples;

pub use compress::{Compress, CompressError, Compressors};
pub use decode::{CodecError, Decoder, Frame, ReadError};
pub use decompress::{DecompressError, Decompressors};
pub use delta::{DeltaError, apply_delta, encode_delta};
pub use encode::{EncodedFrame, Encoder, FrameCounts};
pub use entropy::looks_random;
pub use hashes::PageHashes;
pub use hot_pages::{Delta, HotPages};
pub use method::{Method, MethodError};
