//! Giving pages of guest memory back to the system, while the guest runs.
//!
//! `unsafe`: one `madvise` that takes the content of pages away. Sound because guest memory is never referenced
//! from Rust, so that it may change at any time, and the range is checked to lie within a slot's mapping.

use std::io;

use rustix::fs::FallocateFlags;
use rustix::mm::Advice;

use crate::error::MemoryError;
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
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(file, flags, offset + start, bytes)?;
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
