//! Giving pages of guest memory back to the system, while the guest runs.
//!
//! `unsafe`: one `madvise` that takes the content of pages away. Sound because guest memory is never referenced
//! from Rust, so that it may change at any time, and the range is checked to lie within a slot's mapping.

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
    /// Frees the pages of a run, which read as zeros from then on, and returns those that were freed.
    ///
    /// Private memory loses them by MADV_DONTNEED, which splits transparent huge pages; a file by a hole, for all
    /// processes that have mapped it. A file of huge pages (hugetlbfs) can lose only whole ones: the run is cut
    /// to those, and nothing is left of it (`None`) if it has none. No dirty log sees the change.
    ///
    /// # Errors
    /// A run that is not in its slot, or what the system says; some of the pages may be free then.
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
    /// Frees every page of memory that is made of files, which reads as zeros then.
    ///
    /// # Errors
    /// Memory that is private to this process, or what the file says.
    pub fn punch(&self) -> Result<(), MemoryError> {
        self.each_file("freeing the pages of the file", |slot, file, offset| {
            punch(file, offset, slot.len_bytes() as u64)
        })
    }

    /// Makes memory that is made of files read as zeros, as [`punch`](Self::punch) does, but leaves
    /// a file of huge pages (hugetlbfs) the pages that it has: a hole there would give them and
    /// their reservation back to the pool, from which another process may take them before the
    /// guest needs them. They are zeroed where they are not zero, which is read from the file, as
    /// that populates nothing.
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

    /// Zeroes the pages that hold something, and populates none. By several threads: one takes 0.2
    /// s a GiB, and a source waits meanwhile. (A hole and MADV_POPULATE_WRITE take 0.12 s, in which
    /// another process may take the pages.)
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

/// Threads that zero huge pages, at most: more of them would wait for the same memory.
const MOST_ZEROING: usize = 8;

/// Bytes of a huge page, of which a file of larger ones has several: a piece that is in no cache
/// twice.
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
            let address = slot.host_address().wrapping_add(start as usize);
            // SAFETY: `check_run` has found the run to lie within the slot, which is mapped. Nothing in Rust
            // refers to its content.
            unsafe { rustix::mm::madvise(address.cast(), bytes as usize, Advice::LinuxDontNeed) }?;
        }
    }
    Ok(Some(PageRun { slot: run.slot, first, pages: end - first }))
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
    fn what_is_not_in_the_slot_is_refused() {
        let memory = memory(MemoryKind::Private);
        for (slot, first, pages) in [(0, 12, 5), (0, u64::MAX, 2), (1, 0, 1)] {
            let run = PageRun { slot: SlotId(slot), first, pages };
            assert!(memory.discard(run).is_err(), "{run}");
        }
        assert_eq!(memory.discard(PageRun { slot: SlotId(0), first: 4, pages: 0 }).unwrap(), None);
    }
}
