//! Pieces of a VMM's own migration stream. The destination reproduces the same bytes, whatever they
//! are.
//!
//! A piece is first [divided](crate::EncodedFrame::divide) at the pages that were recognized in it.
//! This is done in stream order, because deltas are computed against pages that both sides keep.
//! Then workers pack the pieces in any order.

mod decode;
mod divide;
mod encode;
mod kept;
#[cfg(test)]
mod tests;

pub use decode::{PieceBytes, StreamDecoder};
pub(crate) use divide::Division;
pub use divide::{PageMark, Piece};
pub use encode::StreamEncoder;
pub use kept::Kept;
