//! The ioctls of write protection by userfaultfd, and the one that queries a mapping of a process.
//!
//! What write protection shares with missing pages is in `vmferry_memory::userfaultfd`.
//!
//! Source: Linux `Documentation/admin-guide/mm/userfaultfd.rst`,
//! `include/uapi/linux/userfaultfd.h`, and for `PROCMAP_QUERY` `include/uapi/linux/fs.h`.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use vmferry_memory::userfaultfd::{self, FaultOrigin, UFFDIO_REGISTER_MODE_WP, UffdioRange};

/// Write protection of shared memory (Linux 5.19).
const UFFD_FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
/// The kernel permits a write to a protected page and records it in the page table (Linux 6.7).
const UFFD_FEATURE_WP_ASYNC: u64 = 1 << 15;
const UFFDIO_WRITEPROTECT_MODE_WP: u64 = 1 << 0;

/// `_IOWR(UFFDIO, 0x06, struct uffdio_writeprotect)`.
const UFFDIO_WRITEPROTECT: libc::c_ulong = 0xc018_aa06;

/// `struct uffdio_writeprotect`.
#[repr(C)]
struct UffdioWriteprotect {
    range: UffdioRange,
    mode: u64,
}
const _: () = assert!(size_of::<UffdioWriteprotect>() == 24);

/// `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: libc::c_ulong = 0xc068_6611;
/// Returns the mapping that contains the address, or else the next one.
const PROCMAP_QUERY_COVERING_OR_NEXT_VMA: u64 = 0x10;

/// `struct procmap_query`.
#[repr(C)]
#[derive(Default)]
struct ProcmapQuery {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}
const _: () = assert!(size_of::<ProcmapQuery>() == 104);

/// A userfaultfd with asynchronous write protection.
///
/// It uses `UFFD_USER_MODE_ONLY`, which is permitted to ordinary users. Asynchronous write
/// protection still sees the kernel's writes, because it raises no fault that would have to be
/// handled.
pub(super) fn open() -> io::Result<OwnedFd> {
    let userfaultfd = userfaultfd::create(FaultOrigin::UserMode)?;
    enable(&userfaultfd)?;
    Ok(userfaultfd)
}

/// Enables asynchronous write protection. It is called once for each descriptor.
pub(super) fn enable(userfaultfd: &OwnedFd) -> io::Result<()> {
    userfaultfd::set_up(userfaultfd, UFFD_FEATURE_WP_ASYNC | UFFD_FEATURE_WP_HUGETLBFS_SHMEM)
}

/// Registers a range of host-virtual addresses for write protection.
pub(super) fn register(userfaultfd: impl AsFd, range: Range<u64>) -> io::Result<()> {
    // SAFETY: writes to the range are permitted as before (WP_ASYNC), and no page counts as
    // missing.
    unsafe { userfaultfd::register(userfaultfd, &range, UFFDIO_REGISTER_MODE_WP) }.map(drop)
}

/// Unregisters a range, which also removes its write protection.
pub(super) fn unregister(userfaultfd: impl AsFd, range: Range<u64>) -> io::Result<()> {
    userfaultfd::unregister(userfaultfd, &range)
}

/// Protects a registered range of shared memory, including pages that are not in a page table yet.
pub(super) fn protect(userfaultfd: impl AsFd, range: Range<u64>) -> io::Result<()> {
    let mut argument =
        UffdioWriteprotect { range: (&range).into(), mode: UFFDIO_WRITEPROTECT_MODE_WP };
    // SAFETY: the argument has the layout of `struct uffdio_writeprotect`, asserted above. Writes
    // are permitted (WP_ASYNC).
    let result = unsafe {
        libc::ioctl(userfaultfd.as_fd().as_raw_fd(), UFFDIO_WRITEPROTECT, &raw mut argument)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The mapping that contains an address, or else the next one, in the process that this
/// `/proc/PID/maps` belongs to; `None` if no mapping follows. `ENOTTY` before Linux 6.11; `ESRCH`
/// if the process has ended.
pub(super) fn mapping(maps: impl AsFd, address: u64) -> io::Result<Option<Range<u64>>> {
    let mut argument = ProcmapQuery {
        size: size_of::<ProcmapQuery>() as u64,
        query_flags: PROCMAP_QUERY_COVERING_OR_NEXT_VMA,
        query_addr: address,
        ..ProcmapQuery::default()
    };
    // SAFETY: the argument has the layout of `struct procmap_query` (asserted above) and its true
    // size. No name and no build ID are requested, so nothing else is written.
    let result = unsafe { libc::ioctl(maps.as_fd().as_raw_fd(), PROCMAP_QUERY, &raw mut argument) };
    if result >= 0 {
        return Ok(Some(argument.vma_start..argument.vma_end));
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::ENOENT) { Ok(None) } else { Err(error) }
}
