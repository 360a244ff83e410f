//! Pages that a guest needs and this host lacks: userfaultfd in MISSING mode.
//!
//! A range of guest memory is registered with a [`FaultDescriptor`]. A thread that touches a page
//! which is not populated there waits, and its [`Fault`] can be read from the descriptor. Placing
//! the page ([`FaultDescriptor::place`]) lets the thread continue. [`FaultRanges`] divides a whole
//! guest's memory between several descriptors. This crate does not know where pages come from.
//!
//! The descriptor belongs to the address space of the process that created it, and works from any
//! process that it was passed to. Handling faults on the memory of another process (QEMU) is the
//! same as on one's own.
//!
//! # Rules for the caller
//!
//! All were tried on Linux 6.18; `tests/faults` has a test for each.
//!
//! - *A missing page of a shared file is a hole in the file.* Any access through another mapping,
//!   `pread` excepted, populates it with zeros. The guest then finds that page and does
//!   not fault. Until it is placed, only this crate may touch a missing page. `SEEK_DATA` and
//!   `PAGEMAP_SCAN` touch nothing.
//! - *When the last duplicate of a descriptor is closed, missing pages read as zeros*, and threads
//!   that wait continue with zeros. So the process that runs the guest must keep a duplicate for as
//!   long as a page is missing: if the handling process dies, faults wait for its successor.
//! - *A fault is reported once.* If the process that has read it dies, its successor calls
//!   [`wake`](FaultDescriptor::wake) on the whole range: the waiting threads fault again, and are
//!   reported again.
//! - *A page that exists is never overwritten.* Placing it again is
//!   [`Placement::present_bytes`], so faults and background pages may race.
//! - *Faults of the kernel are reported too*: those of KVM, and of system calls such as `read` into
//!   guest memory. `UFFD_USER_MODE_ONLY` would make these fail, so this crate never uses it.
//! - *Waking places nothing*, but it must not be used in place of placing. If a thread continues at
//!   a page that is still missing, it faults again.
//!
//! # Huge pages
//!
//! On hugetlbfs the unit is the huge page: a fault names its first byte, and it can be placed only
//! as a whole. If it arrives in parts, they are written through another mapping, and it is shown to
//! the guest once it is complete ([`FaultRanges::show`]). Elsewhere the unit is 4 KiB, also if the
//! kernel may use transparent huge pages: it does not fill a registered range with them.
//!
//! `unsafe` is confined to `ioctl` (the ioctls of this mode). Two functions are `unsafe` to call:
//! [`FaultDescriptor::register_missing`] and [`FaultRanges::register_blocks`].

mod descriptor;
mod error;
mod huge;
mod ioctl;
mod message;
mod open;
mod place;
mod ranges;
mod share;

pub use descriptor::{FaultDescriptor, RangeIoctls};
pub use error::{FaultError, Remedy};
pub use message::{Access, Fault};
pub use place::{Outcome, Placement, Wake};
pub use ranges::{FaultRange, FaultRanges};
pub use share::{FaultShare, Waited};
