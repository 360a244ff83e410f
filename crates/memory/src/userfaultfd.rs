//! What write protection and missing pages share of userfaultfd: creating a descriptor, the
//! handshake, and registering ranges.
//!
//! Source: Linux `Documentation/admin-guide/mm/userfaultfd.rst` and
//! `include/uapi/linux/userfaultfd.h`. The ioctls of one mode are in the crate that uses the mode.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// The threads of the process wait at a page that is missing.
pub const UFFDIO_REGISTER_MODE_MISSING: u64 = 1 << 0;
/// Pages can be write-protected.
pub const UFFDIO_REGISTER_MODE_WP: u64 = 1 << 1;
/// The threads of the process wait at a page that its file has, but its page table has not.
pub const UFFDIO_REGISTER_MODE_MINOR: u64 = 1 << 2;

const UFFD_API: u64 = 0xaa;
const UFFD_USER_MODE_ONLY: libc::c_int = 1;

/// `_IOWR(UFFDIO, 0x3f, struct uffdio_api)`.
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
/// `_IOWR(UFFDIO, 0x00, struct uffdio_register)`.
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
/// `_IOR(UFFDIO, 0x01, struct uffdio_range)`.
const UFFDIO_UNREGISTER: libc::c_ulong = 0x8010_aa01;

/// `struct uffdio_api`.
#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}
const _: () = assert!(size_of::<UffdioApi>() == 24);

/// `struct uffdio_range`: host-virtual addresses in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UffdioRange {
    start: u64,
    len: u64,
}
const _: () = assert!(size_of::<UffdioRange>() == 16);

impl From<&Range<u64>> for UffdioRange {
    fn from(range: &Range<u64>) -> Self {
        Self { start: range.start, len: range.end.saturating_sub(range.start) }
    }
}

/// `struct uffdio_register`.
#[repr(C)]
struct UffdioRegister {
    range: UffdioRange,
    mode: u64,
    ioctls: u64,
}
const _: () = assert!(size_of::<UffdioRegister>() == 32);

/// The faults that a userfaultfd reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultOrigin {
    /// Only those of user mode (`UFFD_USER_MODE_ONLY`), which any user may handle. A system call,
    /// or KVM, that needs a missing page fails.
    UserMode,
    /// Those of the kernel too. The call needs `CAP_SYS_PTRACE`, or `vm.unprivileged_userfaultfd`
    /// must be 1.
    UserAndKernel,
}

/// The argument of the system call: the descriptor is closed by `execve`, and non-blocking.
#[must_use]
pub fn flags(origin: FaultOrigin) -> libc::c_int {
    let only = if origin == FaultOrigin::UserMode { UFFD_USER_MODE_ONLY } else { 0 };
    libc::O_CLOEXEC | libc::O_NONBLOCK | only
}

/// Creates a userfaultfd of this process by the system call: closed by `execve`, and non-blocking,
/// without which `poll` reports an error.
///
/// # Errors
/// `EPERM` if the process may not handle these faults; `ENOSYS` if the kernel has no userfaultfd.
pub fn create(origin: FaultOrigin) -> io::Result<OwnedFd> {
    let flags = flags(origin);
    // SAFETY: the call takes flags only and returns a new descriptor or -1.
    let descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor as i32) })
}

/// The handshake (`UFFDIO_API`), which enables features. It is done once for each userfaultfd.
///
/// # Errors
/// `EINVAL` if the kernel lacks one of the features, or if the handshake was done before.
pub fn set_up(userfaultfd: impl AsFd, features: u64) -> io::Result<()> {
    let mut api = UffdioApi { api: UFFD_API, features, ioctls: 0 };
    // SAFETY: the argument has the layout of `struct uffdio_api`, asserted above.
    let result = unsafe { libc::ioctl(userfaultfd.as_fd().as_raw_fd(), UFFDIO_API, &raw mut api) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Registers a range of host-virtual addresses for the modes `UFFDIO_REGISTER_MODE_*`, and returns
/// the ioctls that the range supports: bit `n` is the ioctl with number `n`.
///
/// # Safety
/// With [`UFFDIO_REGISTER_MODE_MISSING`], and if the userfaultfd belongs to this process, Rust may
/// hold no reference to the range: its missing pages are filled through the descriptor at any time.
///
/// # Errors
/// `EINVAL` if the range is not mapped, or its kind of mapping is not supported; `EBUSY` if another
/// userfaultfd has a part of it; `ENOMEM` also if the process has ended.
pub unsafe fn register(userfaultfd: impl AsFd, range: &Range<u64>, mode: u64) -> io::Result<u64> {
    let mut argument = UffdioRegister { range: range.into(), mode, ioctls: 0 };
    // SAFETY: the argument has the layout of `struct uffdio_register`, asserted above. The kernel
    // checks that the range is mapped, and registering changes no content; the caller has promised
    // the rest.
    let result =
        unsafe { libc::ioctl(userfaultfd.as_fd().as_raw_fd(), UFFDIO_REGISTER, &raw mut argument) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(argument.ioctls) }
}

/// Unregisters a range for all modes. Write protection is removed, and threads that wait at a
/// missing page continue with a page of zeros.
///
/// # Errors
/// `EINVAL` if the range is not mapped; `ENOMEM` also if the process has ended.
pub fn unregister(userfaultfd: impl AsFd, range: &Range<u64>) -> io::Result<()> {
    let mut argument = UffdioRange::from(range);
    // SAFETY: the argument has the layout of `struct uffdio_range`, asserted above.
    let result = unsafe {
        libc::ioctl(userfaultfd.as_fd().as_raw_fd(), UFFDIO_UNREGISTER, &raw mut argument)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
