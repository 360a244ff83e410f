//! Finding the populated pages of a guest without reading or populating any.
//!
//! For a shared file, the populated pages are what `SEEK_DATA` finds in the *file*: a page that
//! another process has written is not in this process's page table. For private memory, they are
//! the pages in this process's page table, in memory or in swap. `mincore` would miss swap.
//! `SEEK_DATA` does not work on hugetlbfs; see [`huge::populated`].

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use rustix::fs::SeekFrom;

use crate::bitmap::PageBitmap;
use crate::error::MemoryError;
use crate::hash::is_zero;
use crate::huge::{self, huge_page_bytes};
use crate::pagemap::{PAGE_IS_PFNZERO, PAGE_IS_PRESENT, PAGE_IS_SWAPPED, PageRegion, Query, scan};
use crate::set::PageSet;
use crate::slots::{Backing, GuestMemory, Slot};
use crate::units::{PAGE_SIZE, PageRun};

const PAGE: u64 = PAGE_SIZE as u64;

impl GuestMemory {
    /// The pages that may hold data. All others read as zeros and need not be sent.
    ///
    /// Start the dirty log before this call: a page that is populated later is then in the log.
    ///
    /// # Errors
    /// An error from the file or the page table.
    pub fn populated(&self) -> Result<PageSet, MemoryError> {
        let mut set = PageSet::for_memory(self);
        for slot in self.slots() {
            let bitmap = set.bitmap_mut(slot.id());
            match slot.backing() {
                Backing::Private => {
                    let query = written(PAGE_IS_PRESENT | PAGE_IS_SWAPPED);
                    in_page_table(slot, query, bitmap).map_err(MemoryError::Pagemap)?;
                }
                Backing::File { file, offset } => {
                    let found = match huge_page_bytes(file) {
                        Ok(None) => in_file(slot, file, *offset, bitmap),
                        Ok(Some(_)) => huge::populated(slot, file, bitmap, |bitmap| {
                            in_page_table(slot, written(PAGE_IS_PRESENT), bitmap)
                        }),
                        Err(error) => Err(error),
                    };
                    found.map_err(|source| MemoryError::Slot {
                        what: "finding the data in the file",
                        slot: slot.id(),
                        source,
                    })?;
                }
            }
        }
        Ok(set)
    }
}

/// Maximum number of populated pages per slot that are sampled to estimate how many are not zero.
const SAMPLES: u64 = 2048;

impl GuestMemory {
    /// Estimated bytes that the guest uses in each slot: its populated pages that are not zero.
    /// Large slots are sampled, and the estimate is low rather than high. `None` where the
    /// populated pages are not known exactly, such as on hugetlbfs, where another process may have
    /// populated some.
    #[must_use]
    pub fn used_bytes(&self) -> Vec<Option<u64>> {
        let Ok(populated) = self.populated() else { return Vec::new() };
        let slots = self.slots().iter();
        slots
            .map(|slot| {
                let is_known = slot.page_bytes().ok() == Some(PAGE);
                is_known.then(|| self.used_of(slot, populated.bitmap(slot.id()))).flatten()
            })
            .collect()
    }

    fn used_of(&self, slot: &Slot, populated: &PageBitmap) -> Option<u64> {
        let pages = populated.count();
        let step = pages.div_ceil(SAMPLES).max(1);
        let (mut looked, mut used, mut next) = (0_u64, 0_u64, 0);
        let mut content = [0; PAGE_SIZE];
        for (first, run_pages) in populated.runs() {
            while next < run_pages {
                let run = PageRun { slot: slot.id(), first: first + next, pages: 1 };
                self.copy_out(run, &mut content).ok()?;
                looked += 1;
                used += u64::from(!is_zero(&content));
                next += step;
            }
            next -= run_pages;
        }
        if step == 1 {
            return Some(used * PAGE);
        }
        // The sampled share minus three standard deviations.
        let share = used as f64 / looked as f64;
        let margin = 3.0 * (share * (1.0 - share) / looked as f64).sqrt();
        Some((pages as f64 * (share - margin).max(0.0)) as u64 * PAGE)
    }
}

fn in_file(slot: &Slot, file: &File, offset: u64, bitmap: &mut PageBitmap) -> io::Result<()> {
    let end = offset + slot.len_bytes() as u64;
    data_extents(file, offset..end, |extent| {
        // Extents are whole pages on tmpfs. Rounding outwards is correct on any file system.
        let first = (extent.start - offset) / PAGE;
        bitmap.set_run(first, (extent.end - offset).div_ceil(PAGE) - first);
    })
}

/// Calls `found` with each extent of a file that holds data, as offsets within `range`, in
/// ascending order. On a file system that cannot tell (hugetlbfs), the whole range is data.
///
/// # Errors
/// An error from the file.
pub fn data_extents(
    file: &File,
    range: Range<u64>,
    mut found: impl FnMut(Range<u64>),
) -> io::Result<()> {
    let mut at = range.start;
    while at < range.end {
        let data = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(data) if data < range.end => data,
            // ENXIO: only a hole follows.
            Ok(_) | Err(rustix::io::Errno::NXIO) => break,
            Err(errno) => return Err(errno.into()),
        };
        let hole = rustix::fs::seek(file, SeekFrom::Hole(data))?.min(range.end);
        found(data..hole);
        at = hole.max(data + 1);
    }
    Ok(())
}

/// Finds pages that have one of the states `any`, and not those that were only read.
fn written(any: u64) -> Query {
    Query { inverted: PAGE_IS_PFNZERO, all: PAGE_IS_PFNZERO, any, ..Query::default() }
}

/// Finds the pages that match in this process's page table.
pub(crate) fn in_page_table(slot: &Slot, query: Query, bitmap: &mut PageBitmap) -> io::Result<()> {
    let pagemap = File::open("/proc/self/pagemap")?;
    let start = slot.host_address() as u64;
    let mut regions = [PageRegion::default(); 256];
    let range = start..start + slot.len_bytes() as u64;
    let scanned = scan(&pagemap, range, query, &mut regions, |region| {
        bitmap.set_run((region.start - start) / PAGE, (region.end - region.start) / PAGE);
    });
    match scanned {
        // The kernel is older than Linux 6.7.
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
            by_entries(&pagemap, slot, bitmap)
        }
        other => other,
    }
}

/// Reads the page table entry by entry (`pagemap.rst`: bit 63 present, bit 62 swapped). A mapping
/// of the shared zero page looks populated here; it costs only a zero-page mark on the wire.
fn by_entries(pagemap: &File, slot: &Slot, bitmap: &mut PageBitmap) -> io::Result<()> {
    let first_entry = slot.host_address() as u64 / PAGE;
    let mut entries = [0_u8; 8 * 1024];
    let mut page = 0;
    while page < slot.pages() {
        let count = (slot.pages() - page).min(entries.len() as u64 / 8);
        let bytes = &mut entries[..count as usize * 8];
        pagemap.read_exact_at(bytes, (first_entry + page) * 8)?;
        for (index, entry) in bytes.chunks_exact(8).enumerate() {
            // Both bits are in the last byte, regardless of the other bits.
            if entry[7] & 0xc0 != 0 {
                bitmap.set(page + index as u64);
            }
        }
        page += count;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryKind, SlotId, SlotLayout};

    fn memory(kind: MemoryKind, pages: u64) -> GuestMemory {
        let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages }];
        GuestMemory::allocate(&layout, kind).unwrap()
    }

    #[test]
    fn populated_has_only_written_pages() {
        for kind in [MemoryKind::Private, MemoryKind::Memfd] {
            let memory = memory(kind, 1 << 21);
            for page in [0, 5, 6, 7, 70_000, (1 << 21) - 1] {
                let run = PageRun { slot: SlotId(0), first: page, pages: 1 };
                memory.copy_in(run, &[1; PAGE_SIZE]).unwrap();
            }
            let populated = memory.populated().unwrap();
            let runs: Vec<_> = populated.bitmap(SlotId(0)).runs().collect();
            assert_eq!(runs, [(0, 1), (5, 3), (70_000, 1), ((1 << 21) - 1, 1)], "{kind}");
            // The search itself has populated nothing.
            assert_eq!(memory.populated().unwrap(), populated);
        }
    }

    #[test]
    fn used_bytes_counts_nonzero_pages_and_never_too_many() {
        for kind in [MemoryKind::Private, MemoryKind::Memfd] {
            for (pages, most_too_few) in [(1000, 0), (9000, 600)] {
                let memory = memory(kind, 2 * pages);
                assert_eq!(memory.used_bytes(), [Some(0)]);
                // A third of the populated pages are zero, and half of the memory is not populated.
                for page in 0..pages {
                    memory.write_at(2 * page * PAGE, &[u8::from(page % 3 > 0)]).unwrap();
                }
                let used = memory.used_bytes()[0].unwrap() / PAGE;
                let right = (0..pages).filter(|page| page % 3 > 0).count() as u64;
                assert!(used <= right && used >= right - most_too_few, "{kind}: {used} of {right}");
            }
        }
    }

    #[test]
    fn read_page_is_not_populated() {
        let memory = memory(MemoryKind::Private, 16);
        memory.read_at(3 * PAGE, &mut [0; 8]).unwrap();
        assert!(memory.populated().unwrap().is_empty());
    }

    #[test]
    fn page_table_scan_matches_a_walk_by_entries() {
        let memory = memory(MemoryKind::Private, 5000);
        for page in (0..5000).step_by(7) {
            memory.write_at(page * PAGE, &[1]).unwrap();
        }
        let mut by_hand = PageBitmap::new(5000);
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        by_entries(&pagemap, &memory.slots()[0], &mut by_hand).unwrap();
        assert_eq!(*memory.populated().unwrap().bitmap(SlotId(0)), by_hand);
    }

    #[test]
    fn punched_memory_is_empty() {
        let memory = memory(MemoryKind::Memfd, 64);
        memory.write_at(5 * PAGE, &[7]).unwrap();
        memory.punch().unwrap();
        assert!(memory.populated().unwrap().is_empty());
        let mut byte = [1];
        memory.read_at(5 * PAGE, &mut byte).unwrap();
        assert_eq!(byte, [0]);
        assert!(super::tests::memory(MemoryKind::Private, 1).punch().is_err());
    }

    #[test]
    fn file_written_by_another_mapping_is_populated() {
        let memory = memory(MemoryKind::Memfd, 64);
        let Backing::File { file, .. } = memory.slots()[0].backing() else { unreachable!() };
        file.write_all_at(&[9], 33 * PAGE).unwrap();
        let populated = memory.populated().unwrap();
        assert_eq!(populated.bitmap(SlotId(0)).runs().collect::<Vec<_>>(), [(33, 1)]);
    }
}
