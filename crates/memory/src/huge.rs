//! Memory on the kernel's reserved huge pages (hugetlbfs).
//!
//! A file on hugetlbfs differs from one on tmpfs in three ways, all found by experiment on Linux
//! 6.18. `SEEK_DATA` and `SEEK_HOLE` report the whole file as one extent of data, populated or not,
//! and `mincore` and `cachestat` do not help either. `pwrite` fails with `EINVAL`. A store for
//! which no page is left kills the process with SIGBUS. Because of the last point a mapping
//! reserves its pages (no `MAP_NORESERVE`), so that a guest that does not fit is refused when it is
//! mapped. Source: Linux `Documentation/admin-guide/mm/hugetlbpage.rst`.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use rustix::fs::MemfdFlags;

use crate::bitmap::PageBitmap;
use crate::error::MemoryError;
use crate::slots::{Backing, Slot};
use crate::units::{PAGE_SIZE, SlotId, SlotLayout};

/// Size in bytes of the huge pages used here for guest memory.
pub(crate) const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// `HUGETLBFS_MAGIC` of `include/uapi/linux/magic.h`.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// Unit of `st_blocks`.
const BLOCK_BYTES: u64 = 512;

/// Creates a file of huge pages. No huge page is taken before the file is mapped.
pub(crate) fn memfd(slot: SlotId, bytes: u64) -> io::Result<File> {
    let name = format!("vmferry-slot-{}", slot.0);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let file = rustix::fs::memfd_create(name, flags)?;
    rustix::fs::ftruncate(&file, bytes)?;
    Ok(file.into())
}

/// Refuses a slot that is not a whole number of huge pages.
pub(crate) fn check_slot(slot: &SlotLayout) -> Result<(), MemoryError> {
    let bytes = slot.pages * PAGE_SIZE as u64;
    if bytes.is_multiple_of(HUGE_PAGE_BYTES) {
        return Ok(());
    }
    Err(MemoryError::Layout(format!(
        "{} has {bytes} bytes, which is no multiple of the 2 MiB of a huge page",
        slot.slot
    )))
}

/// The error for too few huge pages, with the number to reserve for the slots that are not mapped
/// yet.
pub(crate) fn too_few(slots: &[SlotLayout], source: io::Error) -> MemoryError {
    let bytes: u64 = slots.iter().map(|slot| slot.pages * PAGE_SIZE as u64).sum();
    let needed = bytes / HUGE_PAGE_BYTES;
    let pool = |name: &str| {
        let path = format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}");
        let text = std::fs::read_to_string(path).ok();
        text.and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or_default()
    };
    let unclaimed = pool("free_hugepages").saturating_sub(pool("resv_hugepages"));
    let reserve = pool("nr_hugepages") + needed.saturating_sub(unclaimed);
    MemoryError::HugePages { slot: slots[0].slot, needed, unclaimed, reserve, source }
}

impl Slot {
    /// Whether the slot is in a file on hugetlbfs.
    #[must_use]
    pub fn has_huge_pages(&self) -> bool {
        self.page_bytes().is_ok_and(|bytes| bytes > PAGE_SIZE as u64)
    }

    /// Page size in bytes at which the kernel maps and protects the slot: 4096, or more for a file
    /// on hugetlbfs.
    ///
    /// # Errors
    /// An error from the file.
    pub fn page_bytes(&self) -> io::Result<u64> {
        match self.backing() {
            Backing::Private => Ok(PAGE_SIZE as u64),
            Backing::File { file, .. } => huge_page_bytes(file)
                .map(|huge_page_bytes| huge_page_bytes.unwrap_or(PAGE_SIZE as u64)),
        }
    }
}

/// The page size of a file on hugetlbfs; `None` for any other file.
pub fn huge_page_bytes(file: &File) -> io::Result<Option<u64>> {
    let stat = rustix::fs::fstatfs(file)?;
    Ok((stat.f_type as u64 == HUGETLBFS_MAGIC).then_some(stat.f_bsize as u64))
}

/// Finds the populated pages of a slot on hugetlbfs.
///
/// The file itself knows only how many pages are populated (`st_blocks`). `present` finds those in
/// this process's page table. If that number equals the file's, before and after, the set is
/// complete. If not, another process has populated some, and every page of the slot is treated as
/// populated.
pub(crate) fn populated(
    slot: &Slot,
    file: &File,
    bitmap: &mut PageBitmap,
    present: impl FnOnce(&mut PageBitmap) -> io::Result<()>,
) -> io::Result<()> {
    let populated = || Ok::<_, io::Error>(file.metadata()?.blocks() * BLOCK_BYTES);
    let before = populated()?;
    present(bitmap)?;
    let found = bitmap.count() * PAGE_SIZE as u64;
    if before != found || populated()? != found {
        bitmap.set_run(0, slot.pages());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use vmferry_kit::HugePages;

    use super::*;
    use crate::{GuestMemory, MemoryKind, PageRun};

    const HUGE: u64 = HUGE_PAGE_BYTES / PAGE_SIZE as u64;

    fn layout(pages: u64) -> [SlotLayout; 1] {
        [SlotLayout { slot: SlotId(0), gpa: 0, pages }]
    }

    #[test]
    fn slot_size_that_is_no_multiple_of_a_huge_page_is_refused() {
        let error = GuestMemory::allocate(&layout(513), MemoryKind::Hugetlb).unwrap_err();
        assert!(error.to_string().contains("no multiple of the 2 MiB"), "{error}");
    }

    #[test]
    fn too_few_huge_pages_are_an_error_with_a_remedy() {
        // Half a TiB.
        let error = GuestMemory::allocate(&layout(1 << 27), MemoryKind::Hugetlb).unwrap_err();
        assert!(error.to_string().contains("sysctl vm.nr_hugepages="), "{error}");
        assert!(error.to_string().contains("needs 262144 huge pages"), "{error}");
    }

    #[test]
    fn huge_pages_are_found_copied_and_punched() {
        let _pool = HugePages::reserve(4);
        let memory = GuestMemory::allocate(&layout(4 * HUGE), MemoryKind::Hugetlb)
            .expect("this test needs huge pages");
        let runs = || memory.populated().unwrap().bitmap(SlotId(0)).runs().collect::<Vec<_>>();
        assert_eq!(memory.slots()[0].page_bytes().unwrap(), HUGE_PAGE_BYTES);
        assert_eq!(runs(), []);
        let one = PageRun { slot: SlotId(0), first: HUGE + 7, pages: 1 };
        memory.copy_in_new(one, &[3; PAGE_SIZE]).unwrap();
        assert_eq!(runs(), [(HUGE, HUGE)]);
        let mut content = [0; PAGE_SIZE];
        memory.copy_out(one, &mut content).unwrap();
        assert_eq!(content, [3; PAGE_SIZE]);

        // A page that another mapping populates is not in the page table of this one, and SEEK_DATA
        // does not find it. The only correct answer is the whole slot.
        let Backing::File { file, .. } = memory.slots()[0].backing() else { unreachable!() };
        assert_eq!(rustix::fs::seek(file, rustix::fs::SeekFrom::Data(0)).unwrap(), 0);
        let other = vec![(layout(4 * HUGE)[0], file.try_clone().unwrap(), 0)];
        let other = GuestMemory::map_files(other).unwrap();
        other.zero(PageRun { slot: SlotId(0), first: 3 * HUGE, pages: 1 }).unwrap();
        assert_eq!(runs(), [(0, 4 * HUGE)]);
        memory.read_at(3 * HUGE_PAGE_BYTES, &mut content).unwrap();
        assert_eq!(runs(), [(HUGE, HUGE), (3 * HUGE, HUGE)]);

        // Only whole huge pages can be freed.
        let run = |first, pages| PageRun { slot: SlotId(0), first, pages };
        assert_eq!(memory.discard(run(HUGE, HUGE - 1)).unwrap(), None);
        assert_eq!(memory.discard(run(HUGE - 3, HUGE + 9)).unwrap(), Some(run(HUGE, HUGE)));
        assert_eq!(runs(), [(3 * HUGE, HUGE)]);

        memory.punch().unwrap();
        assert_eq!(runs(), []);
    }
}
