//! The address space of the writing process: which parts are still mapped and registered.
//!
//! A scan of the page table skips addresses that are not mapped (`walk_page_range`), and on older
//! kernels it also does not report that a process has ended. So each harvest queries the mappings
//! too. The ways in which a region can be lost, all tried on Linux 6.18:
//!
//! | the process | effect |
//! | --- | --- |
//! | `munmap`, `mremap` away | a hole among the mappings; no write is possible there |
//! | maps the address again | not registered: `EPERM` from the scan (`PM_SCAN_CHECK_WPASYNC`) |
//! | `mremap` to another address | not registered there without `UFFD_FEATURE_EVENT_REMAP` |
//! | `mremap` shrinks, then grows in place | still registered; the part cut off is unpopulated |
//! | ends, or calls `execve` | `ESRCH`: open files of `/proc` belong to the old address space |
//!
//! The events of userfaultfd (`UFFD_EVENT_REMAP`, `_UNMAP`, `_REMOVE`) would report this, but they
//! block the process until they are read.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use vmferry_memory::pagemap::{PAGE_IS_WPALLOWED, PageRegion, Query, scan};

use super::ioctl;

/// The mappings of a process.
pub(super) struct Mappings {
    pub(super) pid: u32,
    pub(super) pagemap: File,
    maps: File,
}

/// Why a range can no longer be logged.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Lost {
    /// The process has ended, or runs another program.
    Process,
    /// Nothing is mapped there.
    Unmapped(Range<u64>),
    /// A mapping there is not registered.
    Unregistered(Range<u64>),
}

impl Mappings {
    /// The mappings of a process. The files stay bound to this address space, even if another
    /// process gets the same PID.
    pub(super) fn of(pid: u32) -> io::Result<Self> {
        let open = |name| File::open(format!("/proc/{pid}/{name}"));
        Ok(Self { pid, pagemap: open("pagemap")?, maps: open("maps")? })
    }

    /// Whether all of a range is mapped: one call for each mapping, without an allocation.
    pub(super) fn all_mapped(
        &self,
        range: &Range<u64>,
        regions: &mut [PageRegion],
    ) -> io::Result<bool> {
        Ok(self.unmapped(range, regions)?.is_none())
    }

    /// Finds out why a range can no longer be logged, if so.
    pub(super) fn lost(
        &self,
        range: &Range<u64>,
        regions: &mut [PageRegion],
    ) -> io::Result<Option<Lost>> {
        if self.ended() {
            return Ok(Some(Lost::Process));
        }
        if let Some(hole) = self.unmapped(range, regions)? {
            return Ok(Some(Lost::Unmapped(hole)));
        }
        let query =
            Query { inverted: PAGE_IS_WPALLOWED, all: PAGE_IS_WPALLOWED, ..Query::default() };
        let mut first = None;
        scan(&self.pagemap, range.clone(), query, regions, |region| {
            first.get_or_insert(region.start..region.end);
        })?;
        Ok(first.map(Lost::Unregistered))
    }

    /// A process without an address space has no mappings to read: an empty file, or `ESRCH`.
    fn ended(&self) -> bool {
        match self.maps.read_at(&mut [0], 0) {
            Ok(bytes) => bytes == 0,
            Err(error) => error.raw_os_error() == Some(libc::ESRCH),
        }
    }

    /// The first part of a range that is not mapped.
    fn unmapped(
        &self,
        range: &Range<u64>,
        regions: &mut [PageRegion],
    ) -> io::Result<Option<Range<u64>>> {
        let mut at = range.start;
        while at < range.end {
            let next = match ioctl::mapping(&self.maps, at) {
                Ok(next) => next.unwrap_or(range.end..range.end),
                // The kernel is older than Linux 6.11.
                Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
                    return self.unmapped_by_scan(range, regions);
                }
                Err(error) => return Err(error),
            };
            if next.start > at {
                return Ok(Some(at..next.start.min(range.end)));
            }
            at = next.end;
        }
        Ok(None)
    }

    /// The same from the page table, which takes a walk through all of it.
    fn unmapped_by_scan(
        &self,
        range: &Range<u64>,
        regions: &mut [PageRegion],
    ) -> io::Result<Option<Range<u64>>> {
        let mut covered = range.start;
        let mut hole = None;
        // Without conditions every mapped page matches, and adjacent regions are merged.
        scan(&self.pagemap, range.clone(), Query::default(), regions, |region| {
            if region.start > covered && hole.is_none() {
                hole = Some(covered..region.start);
            }
            covered = region.end;
        })?;
        Ok(hole.or((covered < range.end).then_some(covered..range.end)))
    }
}

#[cfg(test)]
mod tests {
    use vmferry_memory::{GuestMemory, MemoryKind, SlotId, SlotLayout};

    use super::*;

    #[test]
    fn mappings_detect_a_hole_in_both_ways() {
        let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: 1024 }];
        let memory = GuestMemory::allocate(&layout, MemoryKind::Memfd).unwrap();
        let start = memory.slots()[0].host_address() as u64;
        let range = start..start + (4 << 20);
        let mappings = Mappings::of(std::process::id()).unwrap();
        let mut regions = [PageRegion::default(); 4];
        let userfaultfd = ioctl::open().expect("this test needs userfaultfd");
        ioctl::register(&userfaultfd, range.clone()).unwrap();
        assert_eq!(mappings.unmapped(&range, &mut regions).unwrap(), None);
        assert_eq!(mappings.unmapped_by_scan(&range, &mut regions).unwrap(), None);
        assert_eq!(mappings.lost(&range, &mut regions).unwrap(), None);
        let hole = start + 4096 * 7..start + 4096 * 9;
        let change = |protection: libc::c_int| {
            let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_ANONYMOUS;
            // SAFETY: the range is in this test's own memory and not in use at this time.
            let at = unsafe {
                libc::mmap(hole.start as *mut libc::c_void, 8192, protection, flags, -1, 0)
            };
            assert_eq!(at as u64, hole.start);
        };
        // SAFETY: as above; it is mapped again below, before anything else can be mapped there.
        assert_eq!(unsafe { libc::munmap(hole.start as *mut libc::c_void, 8192) }, 0);
        let by_query = mappings.unmapped(&range, &mut regions).unwrap();
        let by_scan = mappings.unmapped_by_scan(&range, &mut regions).unwrap();
        let lost = mappings.lost(&range, &mut regions).unwrap();
        change(libc::PROT_READ | libc::PROT_WRITE);
        assert_eq!((by_query, by_scan), (Some(hole.clone()), Some(hole.clone())));
        assert_eq!(lost, Some(Lost::Unmapped(hole.clone())));
        assert_eq!(mappings.lost(&range, &mut regions).unwrap(), Some(Lost::Unregistered(hole)));
    }
}
