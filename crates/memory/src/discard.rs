//! Returning pages of guest memory to the system while the guest runs.
//!
//! Why `unsafe`: one `madvise` discards the content of pages. Why sound: Rust code never holds a
//! reference to guest memory, so its content may change at any time, and the range is checked to
//! lie within a slot's mapping.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::FallocateFlags;
use rustix::mm::Advice;

use crate::error::MemoryError;
use crate::hash::is_zero;
use crate::huge::huge_page_bytes;
use crate::slots::{Backing, GuestMemory, Slot};
use crate::units::{PAGE_SIZE, PageRun};

const PAGE: u64 = PAGE_SIZE as u64;

impl GuestMemory {
    /// Frees the pages of a run and returns the run that was freed. Freed pages read as zeros.
    ///
    /// Private memory is freed with MADV_DONTNEED, which splits transparent huge pages. In a file,
    /// a hole is punched, which affects all processes that have mapped it. A file on hugetlbfs can
    /// free only whole huge pages: the run is reduced to those, and `None` is returned if it
    /// contains none. The change is not in any dirty log.
    ///
    /// # Errors
    /// A run that is not within its slot, or an error from the system; in that case some of the
    /// pages may have been freed.
    pub fn discard(&self, run: PageRun) -> Result<Option<PageRun>, MemoryError> {
        let slot = self.check_run(run)?;
        discard(slot, run).map_err(|source| MemoryError::Slot {
            what: "discarding pages",
            slot: slot.id(),
            source,
        })
    }
}

impl GuestMemory {
    /// Removes pages of a file from this process's page table. The file keeps them, and the next
    /// access maps them again. Huge pages need Linux 5.18.
    ///
    /// # Errors
    /// A run that is not within its slot or no whole number of huge pages, private memory, or an
    /// error from the system.
    pub fn unmap_pages(&self, run: PageRun) -> Result<(), MemoryError> {
        let slot = self.check_run(run)?;
        let done = match slot.backing() {
            // Its only copy would be lost.
            Backing::Private => Err(io::ErrorKind::Unsupported.into()),
            Backing::File { .. } => forget_mapping(slot, run.first * PAGE, run.pages * PAGE),
        };
        let what = "removing pages from the page table";
        done.map_err(|source| MemoryError::Slot { what, slot: slot.id(), source })
    }

    /// Frees every page of file-backed memory. The pages then read as zeros.
    ///
    /// # Errors
    /// Memory that is private to this process, or an error from the file.
    pub fn punch(&self) -> Result<(), MemoryError> {
        self.each_file("freeing the pages of the file", |slot, file, offset| {
            punch(file, offset, slot.len_bytes() as u64)
        })
    }

    /// Makes file-backed memory read as zeros, as [`punch`](Self::punch) does, but keeps the huge
    /// pages of a file on hugetlbfs. A hole would return the pages and their reservation to the
    /// pool, and another process might take them before the guest needs them. Huge pages that are
    /// not zero are zeroed in place. The check reads the file, because that populates nothing.
    ///
    /// # Errors
    /// As [`punch`](Self::punch).
    pub fn empty(&self) -> Result<(), MemoryError> {
        self.each_file("emptying the file", |slot, file, offset| match huge_page_bytes(file)? {
            Some(_) => self.zero_in_place(slot, file, offset),
            None => punch(file, offset, slot.len_bytes() as u64),
        })
    }

    fn each_file(
        &self,
        what: &'static str,
        mut action: impl FnMut(&Slot, &File, u64) -> io::Result<()>,
    ) -> Result<(), MemoryError> {
        for slot in self.slots() {
            let done = match slot.backing() {
                Backing::Private => Err(io::ErrorKind::Unsupported.into()),
                Backing::File { file, offset } => action(slot, file, *offset),
            };
            done.map_err(|source| MemoryError::Slot { what, slot: slot.id(), source })?;
        }
        Ok(())
    }

    /// Zeroes the pages that are not zero, and populates none. Several threads work in parallel
    /// because one thread takes 0.2 s per GiB while a source waits. (A hole and MADV_POPULATE_WRITE
    /// take 0.12 s per GiB, but another process may take the pages in that time.)
    fn zero_in_place(&self, slot: &Slot, file: &File, offset: u64) -> io::Result<()> {
        let pieces = (slot.len_bytes() as u64).div_ceil(ZEROED_AT_ONCE);
        let next = AtomicU64::new(0);
        let work = || {
            let mut buffer = vec![0; ZEROED_AT_ONCE as usize];
            loop {
                let piece = next.fetch_add(1, Ordering::Relaxed);
                if piece >= pieces {
                    return Ok(());
                }
                self.zero_piece(slot, file, offset, piece * ZEROED_AT_ONCE, &mut buffer)?;
            }
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_ZEROING);
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            let mut done = work();
            for other in others {
                done = done.and(other.join().unwrap_or_else(|_| Err(io::Error::other("a panic"))));
            }
            done
        })
    }

    fn zero_piece(
        &self,
        slot: &Slot,
        file: &File,
        offset: u64,
        at: u64,
        buffer: &mut [u8],
    ) -> io::Result<()> {
        let bytes = ZEROED_AT_ONCE.min(slot.len_bytes() as u64 - at);
        let piece = &mut buffer[..bytes as usize];
        file.read_exact_at(piece, offset + at)?;
        if is_zero(piece) {
            return Ok(());
        }
        let run = PageRun { slot: slot.id(), first: at / PAGE, pages: bytes / PAGE };
        self.zero(run).map_err(io::Error::other)
    }
}

/// Maximum number of threads that zero huge pages. More would wait for memory bandwidth.
const MOST_ZEROING: usize = 8;

/// Bytes zeroed at a time: one huge page of 2 MiB, or a part of a larger one.
const ZEROED_AT_ONCE: u64 = 2 << 20;

fn punch(file: &File, offset: u64, bytes: u64) -> io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(rustix::fs::fallocate(file, flags, offset, bytes)?)
}

fn discard(slot: &Slot, run: PageRun) -> io::Result<Option<PageRun>> {
    let unit = slot.page_bytes()? / PAGE;
    let first = run.first.next_multiple_of(unit);
    let end = (run.first + run.pages) / unit * unit;
    if first >= end {
        return Ok(None);
    }
    let (start, bytes) = (first * PAGE, (end - first) * PAGE);
    match slot.backing() {
        Backing::File { file, offset } => {
            punch(file, offset + start, bytes)?;
        }
        Backing::Private => {
            forget_mapping(slot, start, bytes)?;
        }
    }
    Ok(Some(PageRun { slot: run.slot, first, pages: end - first }))
}

/// Private memory loses its content; a file keeps it.
fn forget_mapping(slot: &Slot, start: u64, bytes: u64) -> io::Result<()> {
    let address = slot.host_address().wrapping_add(start as usize);
    // SAFETY: the callers have verified by `check_run` that the range lies within the slot, which
    // is mapped. No Rust reference to its content exists.
    Ok(unsafe { rustix::mm::madvise(address.cast(), bytes as usize, Advice::LinuxDontNeed) }?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryKind, SlotId, SlotLayout};

    fn memory(kind: MemoryKind) -> GuestMemory {
        GuestMemory::allocate(&[SlotLayout { slot: SlotId(0), gpa: 0, pages: 16 }], kind).unwrap()
    }

    #[test]
    fn discarded_pages_are_not_populated_and_read_as_zeros() {
        for kind in [MemoryKind::Private, MemoryKind::Memfd, MemoryKind::Thp] {
            let memory = memory(kind);
            for page in 0..16 {
                memory.write_at(page * PAGE, &[7]).unwrap();
            }
            let run = PageRun { slot: SlotId(0), first: 3, pages: 5 };
            assert_eq!(memory.discard(run).unwrap(), Some(run));
            let populated = memory.populated().unwrap();
            let runs: Vec<_> = populated.bitmap(SlotId(0)).runs().collect();
            assert_eq!(runs, [(0, 3), (8, 8)], "{kind}");
            let mut bytes = [1; 2];
            memory.read_at(4 * PAGE, &mut bytes[..1]).unwrap();
            memory.read_at(8 * PAGE, &mut bytes[1..]).unwrap();
            assert_eq!(bytes, [0, 7], "{kind}");
        }
    }

    #[test]
    fn discard_outside_the_slot_is_refused() {
        let memory = memory(MemoryKind::Private);
        for (slot, first, pages) in [(0, 12, 5), (0, u64::MAX, 2), (1, 0, 1)] {
            let run = PageRun { slot: SlotId(slot), first, pages };
            assert!(memory.discard(run).is_err(), "{run}");
        }
        assert_eq!(memory.discard(PageRun { slot: SlotId(0), first: 4, pages: 0 }).unwrap(), None);
    }
}
