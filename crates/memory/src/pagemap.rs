//! The `PAGEMAP_SCAN` ioctl on `/proc/PID/pagemap`.
//!
//! Source: Linux `Documentation/admin-guide/mm/pagemap.rst` and `include/uapi/linux/fs.h`, since
//! 6.7. The ioctl finds pages by category without reading or populating them, and can write-protect
//! the pages it finds in the same walk.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

/// The page is in a range that is registered for asynchronous write protection.
pub const PAGE_IS_WPALLOWED: u64 = 1 << 0;
/// The page was written since it was last write-protected.
pub const PAGE_IS_WRITTEN: u64 = 1 << 1;
/// The page is in memory.
pub const PAGE_IS_PRESENT: u64 = 1 << 3;
/// The page is in swap.
pub const PAGE_IS_SWAPPED: u64 = 1 << 4;
/// The page is the shared zero page.
pub const PAGE_IS_PFNZERO: u64 = 1 << 5;
/// Write-protects the pages that match.
pub const PM_SCAN_WP_MATCHING: u64 = 1 << 0;
/// Fails if a page of the range is not registered for asynchronous write protection.
pub const PM_SCAN_CHECK_WPASYNC: u64 = 1 << 1;

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Default)]
struct PmScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}
const _: () = assert!(size_of::<PmScanArg>() == 96);

/// `struct page_region`: host-virtual addresses in bytes, and the categories that were requested.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageRegion {
    /// First byte.
    pub start: u64,
    /// Byte after the last.
    pub end: u64,
    /// Categories of the pages, limited to those in [`Query::report`].
    pub categories: u64,
}
const _: () = assert!(size_of::<PageRegion>() == 24);

/// Which pages a scan finds. After the bits of `inverted` are flipped, a page matches if it has all
/// categories of `all` and, unless `any` is 0, at least one of `any`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Query {
    /// `PM_SCAN_*` flags.
    pub flags: u64,
    /// Categories that must be absent.
    pub inverted: u64,
    /// Categories that must all be present.
    pub all: u64,
    /// Categories of which at least one must be present.
    pub any: u64,
    /// Categories to report. Adjacent regions that do not differ in these are merged.
    pub report: u64,
}

/// Scans a range of host-virtual addresses and calls `found` with each region that matches, in
/// ascending order. `regions` is the buffer that the kernel fills; its length limits one system
/// call, not the scan. It must not be empty.
///
/// # Errors
/// `ENOTTY` if the kernel has no such ioctl (before 6.7); `EPERM` if [`PM_SCAN_CHECK_WPASYNC`] is
/// set and a page of the range is not registered.
pub fn scan(
    pagemap: impl AsFd,
    range: Range<u64>,
    query: Query,
    regions: &mut [PageRegion],
    mut found: impl FnMut(PageRegion),
) -> io::Result<()> {
    if regions.is_empty() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "no room for regions"));
    }
    let mut start = range.start;
    while start < range.end {
        let mut argument = PmScanArg {
            size: size_of::<PmScanArg>() as u64,
            flags: query.flags,
            start,
            end: range.end,
            vec: regions.as_mut_ptr() as u64,
            vec_len: regions.len() as u64,
            category_inverted: query.inverted,
            category_mask: query.all,
            category_anyof_mask: query.any,
            return_mask: query.report,
            ..PmScanArg::default()
        };
        // SAFETY: the argument has the layout of `struct pm_scan_arg` (asserted above) and its true
        // size; `vec` and `vec_len` describe an exclusive buffer of that many regions. The walk
        // reads and write-protects page table entries and touches no other memory of this process.
        let count =
            unsafe { libc::ioctl(pagemap.as_fd().as_raw_fd(), PAGEMAP_SCAN, &raw mut argument) };
        if count < 0 {
            let error = io::Error::last_os_error();
            if error.kind() == io::ErrorKind::Interrupted {
                continue;
            }
            return Err(error);
        }
        for region in regions.iter().take(count as usize) {
            found(*region);
        }
        if argument.walk_end <= start {
            return Err(io::Error::other("PAGEMAP_SCAN made no progress"));
        }
        start = argument.walk_end;
    }
    Ok(())
}
