//! Finding the pages of a guest that cause no fault.
//!
//! Why `unsafe`: one system call that the C library does not have (`cachestat`). Why sound: the
//! kernel writes one structure of a known size, and touches no other memory.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

use rustix::fs::SeekFrom;

use crate::bitmap::PageBitmap;
use crate::error::MemoryError;
use crate::pagemap::{PAGE_IS_PRESENT, PAGE_IS_SWAPPED, PageRegion, Query, scan};
use crate::populated::{data_extents, in_page_table};
use crate::set::PageSet;
use crate::slots::{Backing, GuestMemory, Slot};
use crate::units::PAGE_SIZE;

const PAGE: u64 = PAGE_SIZE as u64;

impl GuestMemory {
    /// The pages of `among` that cause no fault when they are read: those that may hold data, and
    /// in private memory those that are mapped to the shared zero page. Of a file it looks at these
    /// pages only, so a few runs are found fast. Slots on hugetlbfs are left out.
    ///
    /// # Errors
    /// As [`populated`](Self::populated).
    pub fn present_among(&self, among: &PageSet) -> Result<PageSet, MemoryError> {
        let mut present = PageSet::for_memory(self);
        for slot in self.slots().iter().filter(|slot| !slot.has_huge_pages()) {
            let (among, found) = (among.bitmap(slot.id()), present.bitmap_mut(slot.id()));
            match slot.backing() {
                Backing::Private => {
                    let mut all = PageBitmap::new(slot.pages());
                    let any = PAGE_IS_PRESENT | PAGE_IS_SWAPPED;
                    in_page_table(slot, Query { any, ..Query::default() }, &mut all)
                        .map_err(MemoryError::Pagemap)?;
                    found.set_to_intersection(&all, among);
                }
                Backing::File { file, offset } => {
                    let searched = FileSlot { slot, file, offset: *offset }.search(among);
                    *found = searched.map_err(|source| {
                        let what = "finding the data in the file";
                        MemoryError::Slot { what, slot: slot.id(), source }
                    })?;
                }
            }
        }
        Ok(present)
    }
}

/// Runs of pages: the first page, and the number of pages.
type Runs = [(u64, u64)];

/// Runs are searched in groups within this number of pages. The pages of the page table and of the
/// file are counted for a group: a count takes longer the more of them the file has, and if the two
/// differ, each of its runs is searched.
const GROUP_PAGES: u64 = 512;

/// Fewer runs are faster searched one by one. Measured: a search takes 0.4 to 0.6 µs, and to count
/// 512 pages takes 10 µs.
const FEWEST_COUNTED: usize = 24;

/// Groups that are worth a thread: 100 to 300 µs of work.
const GROUPS_OF_A_THREAD: usize = 32;

/// Maximum number of threads. The guest is paused meanwhile, but the host may have others.
const MOST_SEARCHING: usize = 4;

/// A slot that is mapped from a file.
struct FileSlot<'a> {
    slot: &'a Slot,
    file: &'a File,
    offset: u64,
}

impl FileSlot<'_> {
    /// Finds the data of the file in the runs of `among`.
    fn search(&self, among: &PageBitmap) -> io::Result<PageBitmap> {
        let runs: Vec<_> = among.runs().collect();
        let groups: Vec<&Runs> = groups(&runs).collect();
        let threads = groups.len().div_ceil(GROUPS_OF_A_THREAD).min(MOST_SEARCHING);
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(threads);
        let mut shares = groups.chunks(groups.len().div_ceil(threads.max(1)).max(1));
        let ours = shares.next().unwrap_or_default();
        std::thread::scope(|scope| {
            let others: Vec<_> =
                shares.map(|share| scope.spawn(|| self.search_groups(share, among))).collect();
            let mut found = self.search_groups(ours, among)?;
            for other in others {
                let other = other.join().unwrap_or_else(|_| Err(io::Error::other("a panic")))?;
                found.union_with(&other);
            }
            Ok(found)
        })
    }

    fn search_groups(&self, groups: &[&Runs], among: &PageBitmap) -> io::Result<PageBitmap> {
        let pagemap = File::open("/proc/self/pagemap").ok();
        let mut found = PageBitmap::new(self.slot.pages());
        let mut mapped = PageBitmap::new(self.slot.pages());
        let mut no_data_until = 0;
        for group in groups {
            let counted = pagemap.as_ref().filter(|_| group.len() >= FEWEST_COUNTED);
            let maps_all = counted.map(|pagemap| self.maps_all(pagemap, group, &mut mapped));
            if !matches!(maps_all, Some(Ok(true))) {
                self.search_each(group, &mut no_data_until, &mut found)?;
            }
        }
        let mut mapped_among = PageBitmap::new(self.slot.pages());
        mapped_among.set_to_intersection(&mapped, among);
        found.union_with(&mapped_among);
        Ok(found)
    }

    /// Finds the pages that this process's page table has within a group of runs, and returns
    /// whether the file has no others there.
    ///
    /// # Errors
    /// `ENOTTY` and `ENOSYS` if the kernel is older than Linux 6.7, and errors of the page table.
    fn maps_all(&self, pagemap: &File, group: &Runs, mapped: &mut PageBitmap) -> io::Result<bool> {
        let pages = extent(group);
        let start = self.slot.host_address() as u64;
        let mut regions = [PageRegion::default(); GROUP_PAGES as usize / 2];
        let mut count = 0;
        let range = start + pages.start * PAGE..start + pages.end * PAGE;
        let query = Query { any: PAGE_IS_PRESENT, ..Query::default() };
        scan(pagemap, range, query, &mut regions, |region| {
            let pages = (region.end - region.start) / PAGE;
            mapped.set_run((region.start - start) / PAGE, pages);
            count += pages;
        })?;
        let in_file = self.offset + pages.start * PAGE..self.offset + pages.end * PAGE;
        Ok(pages_of(self.file, in_file)? == count)
    }

    /// Searches runs with one system call for each in which there is no data. There is none from
    /// the start of the last search to `no_data_until`, an offset in the file.
    fn search_each(
        &self,
        runs: &Runs,
        no_data_until: &mut u64,
        found: &mut PageBitmap,
    ) -> io::Result<()> {
        for &(first, pages) in runs {
            let run = self.offset + first * PAGE..self.offset + (first + pages) * PAGE;
            if *no_data_until < run.end {
                *no_data_until = match rustix::fs::seek(self.file, SeekFrom::Data(run.start)) {
                    Ok(data) => data,
                    // Only a hole follows.
                    Err(rustix::io::Errno::NXIO) => u64::MAX,
                    Err(errno) => return Err(errno.into()),
                };
            }
            if *no_data_until < run.end {
                data_extents(self.file, *no_data_until..run.end, |extent| {
                    let first = (extent.start - self.offset) / PAGE;
                    let end = (extent.end - self.offset).div_ceil(PAGE);
                    found.set_run(first, end - first);
                })?;
            }
        }
        Ok(())
    }
}

/// Divides runs into groups that lie within [`GROUP_PAGES`]. A longer run has a group of its own.
fn groups(mut runs: &Runs) -> impl Iterator<Item = &Runs> {
    std::iter::from_fn(move || {
        let end = runs.first()?.0 + GROUP_PAGES;
        let more = runs[1..].iter().take_while(|(first, pages)| first + pages <= end).count();
        let (group, rest) = runs.split_at(1 + more);
        runs = rest;
        Some(group)
    })
}

/// The pages from the first run to the end of the last.
fn extent(runs: &Runs) -> Range<u64> {
    match runs {
        [(first, _), .., (last, pages)] => *first..last + pages,
        [(first, pages)] => *first..first + pages,
        [] => 0..0,
    }
}

/// `struct cachestat_range`, in bytes.
#[repr(C)]
struct CachestatRange {
    offset: u64,
    len: u64,
}

/// `struct cachestat`, in pages.
#[repr(C)]
#[derive(Default)]
struct Cachestat {
    cache: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}
const _: () = assert!(size_of::<CachestatRange>() == 16 && size_of::<Cachestat>() == 40);

/// The same on all architectures.
const SYS_CACHESTAT: libc::c_long = 451;

/// Number of pages that a file on a tmpfs has in a range of offsets, in memory or in swap.
///
/// Source: Linux `mm/filemap.c`, `filemap_cachestat`, since 6.5. It counts a swapped page of a
/// tmpfs as evicted.
fn pages_of(file: &File, range: Range<u64>) -> io::Result<u64> {
    let range = CachestatRange { offset: range.start, len: range.end - range.start };
    let mut counts = Cachestat::default();
    // SAFETY: both arguments have the layout of the kernel's structures (asserted above), and live
    // until the call returns. It writes the second one only.
    let result = unsafe {
        libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut counts, 0)
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(counts.cache + counts.evicted)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::{MemoryKind, SlotId, SlotLayout};

    /// Enough for several threads.
    const PAGES: u64 = 64 * GROUP_PAGES;

    fn memory(kind: MemoryKind) -> GuestMemory {
        let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: PAGES }];
        GuestMemory::allocate(&layout, kind).unwrap()
    }

    #[test]
    fn present_among_finds_what_causes_no_fault() {
        for kind in [MemoryKind::Private, MemoryKind::Memfd] {
            let memory = memory(kind);
            let mut among = PageSet::for_memory(&memory);
            for (first, pages) in [(0, 2), (10, 20), (40, 1), (100, 50), (300, 1), (PAGES - 1, 1)] {
                among.bitmap_mut(SlotId(0)).set_run(first, pages);
            }
            for page in [1, 2, 5, 12, 13, 29, 30, 39, 41, 149, 299, 301, 4000] {
                memory.write_at(page * PAGE, &[7]).unwrap();
            }
            // Reading a hole of private memory maps the shared zero page.
            let mut byte = [1];
            memory.read_at(40 * PAGE, &mut byte).unwrap();
            assert_eq!(byte, [0]);
            let present = memory.present_among(&among).unwrap();
            let runs: Vec<_> = present.bitmap(SlotId(0)).runs().collect();
            let mut expected = vec![(1, 1), (12, 2), (29, 1), (149, 1)];
            // A file has a page of its own for each page that was read through a mapping.
            expected.insert(3, (40, 1));
            assert_eq!(runs, expected, "{kind}");
            let all = memory.present_among(&memory.populated().unwrap()).unwrap();
            assert!(!all.is_empty());
        }
    }

    /// Every second page is missing, and the other ones are there.
    fn every_second(memory: &GuestMemory) -> PageSet {
        let mut among = PageSet::for_memory(memory);
        for page in (0..PAGES).step_by(2) {
            among.bitmap_mut(SlotId(0)).set(page);
            memory.write_at((page + 1) * PAGE, &[7]).unwrap();
        }
        among
    }

    fn file(memory: &GuestMemory) -> FileSlot<'_> {
        let slot = &memory.slots()[0];
        let Backing::File { file, offset } = slot.backing() else { unreachable!() };
        FileSlot { slot, file, offset: *offset }
    }

    #[test]
    fn many_runs_are_counted() {
        let memory = memory(MemoryKind::Memfd);
        let among = every_second(&memory);
        assert!(memory.present_among(&among).unwrap().is_empty());
        let (file, mut mapped) = (file(&memory), PageBitmap::new(PAGES));
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let runs: Vec<_> = among.bitmap(SlotId(0)).runs().collect();
        match file.maps_all(&pagemap, &runs, &mut mapped) {
            Ok(maps_all) => assert!(maps_all && mapped.count() == PAGES / 2 - 1),
            // The kernel is older.
            Err(error) => {
                assert!(matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::ENOSYS)))
            }
        }
    }

    #[test]
    fn groups_have_each_run_once_and_lie_within_their_pages() {
        let runs = [(0, 1), (5, 507), (513, 1), (600, 2000), (2700, 1), (3211, 1), (3212, 1)];
        let groups: Vec<_> = groups(&runs).collect();
        assert_eq!(groups, [&runs[..2], &runs[2..3], &runs[3..4], &runs[4..6], &runs[6..]]);
        assert_eq!(groups.concat(), runs);
    }

    #[test]
    fn one_page_among_many_runs_is_found() {
        for page in [0, 510, 512, 1024, PAGES - 2] {
            let memory = memory(MemoryKind::Memfd);
            let among = every_second(&memory);
            memory.write_at(page * PAGE, &[7]).unwrap();
            let present = memory.present_among(&among).unwrap();
            assert_eq!(present.bitmap(SlotId(0)).runs().collect::<Vec<_>>(), [(page, 1)]);
        }
    }

    #[test]
    fn page_that_only_another_mapping_has_made_is_found() {
        for page in [0, 510, 512, 1024, PAGES - 2] {
            let memory = memory(MemoryKind::Memfd);
            let among = every_second(&memory);
            file(&memory).file.write_all_at(&[9], page * PAGE).unwrap();
            let present = memory.present_among(&among).unwrap();
            assert_eq!(present.bitmap(SlotId(0)).runs().collect::<Vec<_>>(), [(page, 1)]);
        }
    }

    #[test]
    fn pages_that_are_not_mapped_do_not_hide_one_that_is() {
        let memory = memory(MemoryKind::Memfd);
        let among = every_second(&memory);
        memory.write_at(100 * PAGE, &[7]).unwrap();
        let run = crate::PageRun { slot: SlotId(0), first: 0, pages: 99 };
        memory.unmap_pages(run).unwrap();
        let present = memory.present_among(&among).unwrap();
        assert_eq!(present.bitmap(SlotId(0)).runs().collect::<Vec<_>>(), [(100, 1)]);
    }
}
