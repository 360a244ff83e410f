//! Pieces of a VMM's own migration stream: the same bytes at the other end, whatever they are.
//!
//! A piece is [divided](crate::EncodedFrame::divide) where pages were recognised in it, in the order of the stream, as deltas
//! are made there against pages that both sides keep; then a worker packs it, in any order.

mod decode;
mod divide;
mod encode;
mod kept;
#[cfg(test)]
mod tests;

pub use decode::{Kept, PieceBytes, StreamDecoder};
pub(crate) use divide::Division;
pub use divide::{PageMark, Piece};
pub use encode::StreamEncoder;
