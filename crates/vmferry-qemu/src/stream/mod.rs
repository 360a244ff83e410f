//! Finding the guest's pages in the streams of QEMU's own migration.
//!
//! Bytes go in, as QEMU writes them to a socket; out come the places of whole pages, with the block and page that
//! each belongs to. Nothing is changed, and nothing has to be understood: what is not recognised is
//! carried as it is. So a mistake costs compression and never correctness, and these parsers rather give up than guess.
//! The one thing that is taken from a stream beside pages is that the guest was paused before QEMU
//! stopped it; a mistake there leaves the guest paused at the destination.
//! `docs/qemu-stream.md` says what of the format they know, and from where.
//!
//! * [`MainStream`]: the stream that every migration has,
//! * [`MultifdChannel`]: one of those that the capability `multifd` adds.

mod blocks;
mod bytes;
mod main_stream;
mod multifd;
mod record;

pub use blocks::Blocks;
pub use main_stream::MainStream;
pub(crate) use main_stream::is_paused;
pub use multifd::MultifdChannel;

/// The bytes of a page of the guest (`TARGET_PAGE_SIZE`), always 4 KiB on x86-64.
const PAGE: usize = vmferry_memory::PAGE_SIZE;
