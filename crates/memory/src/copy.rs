//! Copying pages out of and into guest memory.
//!
//! Why `unsafe`: guest memory is raw memory that the guest, KVM and other processes write at any
//! time, so no Rust reference to it may exist. Why sound: every range is checked against its slot
//! first ([`GuestMemory::check_run`]), the creator of a [`crate::Slot`] promised that the slot is
//! mapped, and bytes are moved by raw copies only. A copy that races with the guest may be torn.
//! The engine re-protects pages before it copies them, so a torn page is dirty again.

use std::io;

use rustix::io::Errno;

use crate::error::MemoryError;
use crate::room::Room;
use crate::slots::{GuestMemory, Slot};
use crate::units::{PAGE_SIZE, PageRun};

/// Host address of a run's first byte. The run has been checked against the slot.
pub(crate) fn address(slot: &Slot, run: PageRun) -> *mut u8 {
    slot.host_address().wrapping_add(run.first as usize * PAGE_SIZE)
}

impl GuestMemory {
    /// Copies pages out of live memory. The engine reads each page only through this copy.
    ///
    /// # Errors
    /// A run outside its slot, or a buffer that is not exactly `run.pages` pages long.
    pub fn copy_out(&self, run: PageRun, into: &mut [u8]) -> Result<(), MemoryError> {
        let slot = self.check_buffer(run, into.len())?;
        // SAFETY: the source range lies in the slot, which is mapped; the destination is a distinct
        // exclusive buffer of the same length. The guest may write the source during the copy:
        // bytes may be torn, which the caller expects, and no reference to them is created.
        unsafe {
            std::ptr::copy_nonoverlapping(
                address(slot, run).cast_const(),
                into.as_mut_ptr(),
                into.len(),
            );
        }
        Ok(())
    }

    /// Copies pages into guest memory.
    ///
    /// # Errors
    /// A run outside its slot, or a buffer that is not exactly `run.pages` pages long.
    pub fn copy_in(&self, run: PageRun, from: &[u8]) -> Result<(), MemoryError> {
        let slot = self.check_buffer(run, from.len())?;
        // SAFETY: as in `copy_out`, with the roles exchanged.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), address(slot, run), from.len()) };
        Ok(())
    }

    /// Copies pages into guest memory that has not been written before. All pages are populated in
    /// one call first, which avoids a fault per page, and the zeroed memory is still in the cache
    /// when it is overwritten. `vmferry-bench place`, a GiB of tmpfs in pieces of 256 KiB by two
    /// threads: 343 ms this way, 433 ms with faults, and 448 ms with `pwrite`, which locks the
    /// file.
    ///
    /// # Errors
    /// A run outside its slot, a buffer that is not exactly `run.pages` pages long, or no memory
    /// left. A full tmpfs is reported here, where a store would kill the process.
    pub fn copy_in_new(&self, run: PageRun, from: &[u8]) -> Result<(), MemoryError> {
        self.prepare_new(run)?;
        self.copy_in(run, from)
    }

    /// Populates pages that are about to be written for the first time, if the system supports it.
    ///
    /// # Errors
    /// As [`copy_in_new`](Self::copy_in_new).
    pub fn prepare_new(&self, run: PageRun) -> Result<(), MemoryError> {
        match self.populate(run) {
            // Linux before 5.14 cannot populate; the store will.
            Err(MemoryError::Slot { source, .. })
                if source.raw_os_error() == Some(libc::EINVAL) =>
            {
                Ok(())
            }
            other => other,
        }
    }

    /// Writes zeros over pages, which populates them.
    ///
    /// # Errors
    /// A run outside its slot.
    pub fn zero(&self, run: PageRun) -> Result<(), MemoryError> {
        let slot = self.check_run(run)?;
        // SAFETY: the range lies in the slot, which is mapped writable.
        unsafe { std::ptr::write_bytes(address(slot, run), 0, run.pages as usize * PAGE_SIZE) };
        Ok(())
    }

    /// Populates pages writable in one call, without changing their content, so that the copy that
    /// follows does not fault at each page.
    ///
    /// # Errors
    /// A run outside its slot, or an error from the system (no memory left).
    pub fn populate(&self, run: PageRun) -> Result<(), MemoryError> {
        let slot = self.check_run(run)?;
        if run.pages == 0 {
            return Ok(());
        }
        // SAFETY: the range lies in the slot, which is mapped; populating changes no content.
        let populated = unsafe {
            rustix::mm::madvise(
                address(slot, run).cast(),
                run.pages as usize * PAGE_SIZE,
                rustix::mm::Advice::LinuxPopulateWrite,
            )
        };
        populated.map_err(|errno| refused(slot, errno))
    }

    /// Reads bytes at a guest-physical address; the range must lie within one slot.
    ///
    /// # Errors
    /// [`MemoryError::NoMemoryAt`].
    pub fn read_at(&self, gpa: u64, into: &mut [u8]) -> Result<(), MemoryError> {
        let from = self.host_range(gpa, into.len())?;
        // SAFETY: `host_range` has verified that the range is within a mapped slot.
        unsafe {
            std::ptr::copy_nonoverlapping(from.cast_const(), into.as_mut_ptr(), into.len());
        }
        Ok(())
    }

    /// Writes bytes at a guest-physical address; the range must lie within one slot.
    ///
    /// # Errors
    /// [`MemoryError::NoMemoryAt`].
    pub fn write_at(&self, gpa: u64, from: &[u8]) -> Result<(), MemoryError> {
        let into = self.host_range(gpa, from.len())?;
        // SAFETY: `host_range` has verified that the range is within a mapped slot.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into, from.len()) };
        Ok(())
    }

    fn check_buffer(&self, run: PageRun, bytes: usize) -> Result<&Slot, MemoryError> {
        let slot = self.check_run(run)?;
        if run.pages as usize * PAGE_SIZE == bytes {
            Ok(slot)
        } else {
            Err(MemoryError::BufferLength { run, bytes })
        }
    }

    fn host_range(&self, gpa: u64, bytes: usize) -> Result<*mut u8, MemoryError> {
        self.slots()
            .iter()
            .find_map(|slot| {
                let offset = usize::try_from(gpa.checked_sub(slot.gpa().0)?).ok()?;
                let end = offset.checked_add(bytes)?;
                (end <= slot.len_bytes()).then(|| slot.host_address().wrapping_add(offset))
            })
            .ok_or(MemoryError::NoMemoryAt { gpa, bytes })
    }
}

/// The error for pages that could not be populated. The kernel reports a full file as EFAULT, where
/// a store would raise SIGBUS.
fn refused(slot: &Slot, errno: Errno) -> MemoryError {
    let (source, id) = (io::Error::from(errno), slot.id());
    let is_full = matches!(errno, Errno::FAULT | Errno::NOMEM | Errno::NOSPC);
    match slot.fullest().filter(|_| is_full) {
        Some(Room { place, free_bytes, .. }) => {
            let bytes = slot.len_bytes() as u64;
            MemoryError::NoRoom { slot: id, bytes, place, free_bytes, source }
        }
        None => MemoryError::Slot { what: "populating pages", slot: id, source },
    }
}

#[cfg(test)]
mod tests {
    use crate::{GuestMemory, MemoryError, MemoryKind, PAGE_SIZE, PageRun, SlotId, SlotLayout};

    fn memory(kind: MemoryKind) -> GuestMemory {
        let layout = [
            SlotLayout { slot: SlotId(0), gpa: 0, pages: 8 },
            SlotLayout { slot: SlotId(1), gpa: 1 << 32, pages: 4 },
        ];
        GuestMemory::allocate(&layout, kind).unwrap()
    }

    fn run(slot: u16, first: u64, pages: u64) -> PageRun {
        PageRun { slot: SlotId(slot), first, pages }
    }

    #[test]
    fn copies_round_trip() {
        for kind in [MemoryKind::Private, MemoryKind::Memfd, MemoryKind::Thp] {
            let memory = memory(kind);
            let pages: Vec<u8> = (0..2 * PAGE_SIZE).map(|byte| byte as u8 ^ 0x5a).collect();
            memory.copy_in(run(1, 2, 2), &pages).unwrap();
            let mut back = vec![0; pages.len()];
            memory.copy_out(run(1, 2, 2), &mut back).unwrap();
            assert_eq!(back, pages);
            memory.zero(run(1, 3, 1)).unwrap();
            memory.populate(run(0, 0, 8)).unwrap();
            let mut byte = [1];
            memory.read_at((1 << 32) + 3 * PAGE_SIZE as u64, &mut byte).unwrap();
            assert_eq!(byte, [0]);
            memory.read_at((1 << 32) + 2 * PAGE_SIZE as u64, &mut byte).unwrap();
            assert_eq!(byte, [0x5a]);
        }
    }

    #[test]
    fn access_outside_a_slot_is_refused() {
        let memory = memory(MemoryKind::Private);
        let mut page = [0; PAGE_SIZE];
        let outside = [run(0, 8, 1), run(0, u64::MAX, 1), run(0, 1, u64::MAX), run(1, 4, 1)];
        for run in outside {
            let error = memory.copy_out(run, &mut page).unwrap_err();
            assert!(matches!(error, MemoryError::OutOfSlot { .. }), "{error}");
        }
        let error = memory.copy_in(run(2, 0, 1), &page).unwrap_err();
        assert_eq!(error.to_string(), "there is no slot 2: this memory has 2 slots");
        let error = memory.copy_in(run(0, 0, 2), &page).unwrap_err();
        assert!(matches!(error, MemoryError::BufferLength { .. }), "{error}");
        for gpa in [8 * PAGE_SIZE as u64, (8 * PAGE_SIZE as u64) - 1, u64::MAX] {
            assert!(memory.read_at(gpa, &mut [0; 2]).is_err());
        }
    }
}
