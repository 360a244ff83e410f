//! The ioctls of userfaultfd that concern missing pages.
//!
//! Source: Linux `Documentation/admin-guide/mm/userfaultfd.rst` and
//! `include/uapi/linux/userfaultfd.h`.
//!
//! Why sound: only `copy` and `zero_page` change memory, and the kernel fills only pages that are
//! missing in a range that is registered with the descriptor. The caller that registered it has
//! promised that Rust holds no reference there (`vmferry_memory::userfaultfd::register`).

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use vmferry_memory::userfaultfd::UffdioRange;

use crate::Wake;

/// `_IO(0xAA, 0x00)`, on `/dev/userfaultfd`.
const USERFAULTFD_IOC_NEW: libc::c_ulong = 0xaa00;
/// `_IOR(UFFDIO, 0x02, struct uffdio_range)`.
const UFFDIO_WAKE: libc::c_ulong = 0x8010_aa02;
/// `_IOWR(UFFDIO, 0x03, struct uffdio_copy)`.
const UFFDIO_COPY: libc::c_ulong = 0xc028_aa03;
/// `_IOWR(UFFDIO, 0x04, struct uffdio_zeropage)`.
const UFFDIO_ZEROPAGE: libc::c_ulong = 0xc020_aa04;
/// `_IOWR(UFFDIO, 0x07, struct uffdio_continue)`.
const UFFDIO_CONTINUE: libc::c_ulong = 0xc020_aa07;

/// `UFFDIO_COPY_MODE_DONTWAKE`, and the same for zero pages and for pages of a file.
const DONTWAKE: u64 = 1 << 0;

/// `struct uffdio_copy`.
#[repr(C)]
struct UffdioCopy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    /// Bytes copied, or a negative error.
    copy: i64,
}
const _: () = assert!(size_of::<UffdioCopy>() == 40);

/// `struct uffdio_zeropage`.
#[repr(C)]
struct UffdioZeropage {
    range: UffdioRange,
    mode: u64,
    /// Bytes placed, or a negative error.
    zeropage: i64,
}
const _: () = assert!(size_of::<UffdioZeropage>() == 32);

/// `struct uffdio_continue`.
#[repr(C)]
struct UffdioContinue {
    range: UffdioRange,
    mode: u64,
    /// Bytes mapped, or a negative error.
    mapped: i64,
}
const _: () = assert!(size_of::<UffdioContinue>() == 32);

/// Creates a userfaultfd of this process by `/dev/userfaultfd`, as the system call would.
pub(crate) fn create(device: impl AsFd) -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: the request takes flags only and returns a new descriptor or -1.
    let descriptor = unsafe { libc::ioctl(device.as_fd().as_raw_fd(), USERFAULTFD_IOC_NEW, flags) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Fills missing pages from address `at` on with `pages`, and returns the bytes placed. They are
/// fewer than requested if an error follows them; the next call returns that error.
pub(crate) fn copy(userfaultfd: impl AsFd, at: u64, pages: &[u8], wake: Wake) -> io::Result<u64> {
    let mut argument = UffdioCopy {
        dst: at,
        src: pages.as_ptr() as u64,
        len: pages.len() as u64,
        mode: mode(wake),
        copy: 0,
    };
    // SAFETY: the argument has the layout of `struct uffdio_copy`, asserted above. The kernel reads
    // `src` and `len`, which describe a borrowed buffer. What it writes: see the top of the file.
    let result =
        unsafe { libc::ioctl(userfaultfd.as_fd().as_raw_fd(), UFFDIO_COPY, &raw mut argument) };
    placed(result, argument.copy)
}

/// Fills missing pages of a range with zeros, and returns the bytes placed, as [`copy`].
pub(crate) fn zero_page(userfaultfd: impl AsFd, range: &Range<u64>, wake: Wake) -> io::Result<u64> {
    let mut argument = UffdioZeropage { range: range.into(), mode: mode(wake), zeropage: 0 };
    // SAFETY: the argument has the layout of `struct uffdio_zeropage`, asserted above. What the
    // kernel writes: see the top of the file.
    let result =
        unsafe { libc::ioctl(userfaultfd.as_fd().as_raw_fd(), UFFDIO_ZEROPAGE, &raw mut argument) };
    placed(result, argument.zeropage)
}

/// Maps pages of a range that its file has, and returns the bytes mapped, as [`copy`]. It fails
/// with `EFAULT` if the file lacks the page.
pub(crate) fn map(userfaultfd: impl AsFd, range: &Range<u64>, wake: Wake) -> io::Result<u64> {
    let mut argument = UffdioContinue { range: range.into(), mode: mode(wake), mapped: 0 };
    // SAFETY: the argument has the layout of `struct uffdio_continue`, asserted above. The request
    // changes no content: it maps what the file has.
    let result =
        unsafe { libc::ioctl(userfaultfd.as_fd().as_raw_fd(), UFFDIO_CONTINUE, &raw mut argument) };
    placed(result, argument.mapped)
}

/// Lets the threads that wait in a range continue. They fault again if the page is still missing.
pub(crate) fn wake(userfaultfd: impl AsFd, range: &Range<u64>) -> io::Result<()> {
    let mut argument = UffdioRange::from(range);
    // SAFETY: the argument has the layout of `struct uffdio_range`, which is asserted where it is
    // defined. The request changes no memory.
    let result =
        unsafe { libc::ioctl(userfaultfd.as_fd().as_raw_fd(), UFFDIO_WAKE, &raw mut argument) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn mode(wake: Wake) -> u64 {
    match wake {
        Wake::Now => 0,
        Wake::Later => DONTWAKE,
    }
}

/// The result of a request that places pages: it fails with `EAGAIN` if it has placed only some.
fn placed(result: libc::c_int, bytes: i64) -> io::Result<u64> {
    let error = (result < 0).then(io::Error::last_os_error);
    match error {
        Some(error) if error.raw_os_error() != Some(libc::EAGAIN) || bytes <= 0 => Err(error),
        _ => Ok(bytes.unsigned_abs()),
    }
}
