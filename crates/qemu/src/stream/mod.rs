//! Finds the guest's pages in the streams of QEMU's own migration.
//!
//! Bytes go in, as QEMU writes them to a socket. The positions of whole pages come out, with the
//! block and page that each belongs to. Nothing is changed, and nothing has to be understood:
//! unrecognized data is carried unchanged. So a mistake costs compression and never correctness,
//! and these parsers prefer giving up to guessing. The only other fact that is taken from a stream
//! is that the guest was paused before QEMU stopped it; a mistake there leaves the guest paused at
//! the destination. `docs/qemu-stream.md` describes which parts of the format they recognize, with
//! sources.
//!
//! * [`MainStream`]: the stream that every migration has.
//! * [`MultifdChannel`]: one of the streams that the `multifd` capability adds.
//! * [`AnyStream`]: either of them, or any other bytes, of a guest that is not described.

mod any;
mod blocks;
mod bytes;
mod main_stream;
mod multifd;
mod record;

pub use any::AnyStream;
pub use blocks::Blocks;
pub use main_stream::MainStream;
pub(crate) use main_stream::is_paused;
pub use multifd::MultifdChannel;
pub(crate) use record::{EOS, WHOLE, ZERO};

/// The size of a guest page in bytes (`TARGET_PAGE_SIZE`), always 4 KiB on x86-64.
const PAGE: usize = vmferry_memory::PAGE_SIZE;
