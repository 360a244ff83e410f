//! The memory of a vCPU's dirty ring, which this process shares with the kernel.
//!
//! The kernel's `struct kvm_dirty_gfn` is `{ u32 flags; u32 slot; u64 offset; }`. Entries go
//! through three states (Linux `Documentation/virt/kvm/api.rst`, section 8.29, and
//! `include/uapi/linux/kvm.h`):
//!
//! ```text
//!   unused (0) --kernel: slot, offset, then DIRTY--> dirty
//!   dirty --this process: RESET--> harvested --kernel--> unused
//! ```
//!
//! The invariants that `unsafe` relies on: a [`RingMemory`] maps `entries × 16` bytes and one more
//! page, shared and writable, from its creation until it is dropped. It gives out references to the
//! entries only, which do not outlive it. Every field is an atomic, because the kernel changes them
//! at any time. No other Rust reference to this memory exists.

use std::io;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use kvm_bindings::KVM_DIRTY_LOG_PAGE_OFFSET;
use vmferry_memory::PAGE_SIZE;

/// `KVM_DIRTY_GFN_F_DIRTY`.
const DIRTY: u32 = 1;
/// `KVM_DIRTY_GFN_F_RESET`.
const RESET: u32 = 2;

/// `struct kvm_dirty_gfn`.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct DirtyGfn {
    flags: AtomicU32,
    slot: AtomicU32,
    offset: AtomicU64,
}

pub(super) const ENTRY_BYTES: usize = 16;
const _: () = assert!(size_of::<DirtyGfn>() == ENTRY_BYTES && align_of::<DirtyGfn>() == 8);

impl DirtyGfn {
    /// If the entry is dirty, marks it as harvested and returns KVM's slot number and the page.
    pub(super) fn harvest(&self) -> Option<(u32, u64)> {
        // Acquire: the kernel writes slot and offset before the flag.
        if self.flags.load(Ordering::Acquire) & (DIRTY | RESET) != DIRTY {
            return None;
        }
        let entry = (self.slot.load(Ordering::Relaxed), self.offset.load(Ordering::Relaxed));
        // Release: both are read before the kernel may use the entry again.
        self.flags.store(RESET, Ordering::Release);
        Some(entry)
    }

    /// Whether the entry is harvested and not reset by the kernel yet.
    pub(super) fn is_harvested(&self) -> bool {
        self.flags.load(Ordering::Acquire) & RESET != 0
    }

    /// Does what the kernel does when the guest writes a page.
    #[cfg(test)]
    pub(super) fn push(&self, slot: u32, offset: u64) {
        assert_eq!(self.flags.load(Ordering::Relaxed), 0, "the ring is overrun");
        self.slot.store(slot, Ordering::Relaxed);
        self.offset.store(offset, Ordering::Relaxed);
        self.flags.store(DIRTY, Ordering::Release);
    }

    /// Does what the kernel does when it resets the entry.
    #[cfg(test)]
    pub(super) fn reset(&self) {
        self.flags.store(0, Ordering::Release);
    }
}

/// A mapped ring.
pub(super) struct RingMemory {
    first: NonNull<DirtyGfn>,
    entries: usize,
}

// SAFETY: the value owns its mapping, which belongs to the process and not to a thread, and gives
// out atomics only.
unsafe impl Send for RingMemory {}
// SAFETY: as above.
unsafe impl Sync for RingMemory {}

impl RingMemory {
    /// Maps the ring of a vCPU, at page `KVM_DIRTY_LOG_PAGE_OFFSET` of its descriptor. The mapping
    /// keeps the vCPU alive, so it stays valid when the descriptor is closed.
    ///
    /// # Errors
    /// The error of `mmap`, EFAULT if the vCPU has no ring or a shorter one, and EFBIG if it has a
    /// longer one.
    pub(super) fn map(vcpu: RawFd, entries: u32) -> io::Result<Self> {
        let memory = Self::map_pages(vcpu, libc::MAP_SHARED, entries as usize)?;
        // The kernel maps any length, and access to a page beyond the ring raises SIGBUS.
        // Populating the pages detects that now, and harvests then have no page faults.
        let refused = |populated: io::Result<()>| populated.err().and_then(|e| e.raw_os_error());
        match refused(memory.populate(0, memory.entries_bytes())) {
            None => {}
            // Linux before 5.14 cannot populate, so the caller's length is trusted.
            Some(libc::EINVAL) => return Ok(memory),
            Some(errno) => return Err(io::Error::from_raw_os_error(errno)),
        }
        match refused(memory.populate(memory.entries_bytes(), PAGE_SIZE)) {
            Some(_) => Ok(memory),
            None => Err(io::Error::from_raw_os_error(libc::EFBIG)),
        }
    }

    /// A ring without a vCPU, for tests.
    #[cfg(test)]
    pub(super) fn anonymous(entries: usize) -> Self {
        Self::map_pages(-1, libc::MAP_SHARED | libc::MAP_ANONYMOUS, entries).unwrap()
    }

    fn map_pages(file: RawFd, flags: libc::c_int, entries: usize) -> io::Result<Self> {
        let offset = match flags & libc::MAP_ANONYMOUS {
            0 => i64::from(KVM_DIRTY_LOG_PAGE_OFFSET) * PAGE_SIZE as i64,
            _ => 0,
        };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let bytes = mapped_bytes(entries);
        // SAFETY: a new mapping at an address of the kernel's choice changes no existing memory.
        let address =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, file, offset) };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let first = NonNull::new(address.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { first, entries })
    }

    fn entries_bytes(&self) -> usize {
        self.entries * ENTRY_BYTES
    }

    /// Makes the kernel populate `bytes` bytes of the mapping from byte `at` on.
    fn populate(&self, at: usize, bytes: usize) -> io::Result<()> {
        let address = self.first.as_ptr().cast::<u8>().wrapping_add(at);
        // SAFETY: this advice changes no content, and it fails for an address that is not mapped.
        let result = unsafe { libc::madvise(address.cast(), bytes, libc::MADV_POPULATE_READ) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    pub(super) fn entries(&self) -> &[DirtyGfn] {
        // SAFETY: the mapping has `entries` entries, is page-aligned, was zeroed by the kernel
        // before it was mapped, is valid for any bit pattern, and exists as long as `self`. The
        // kernel's concurrent writes are to atomics.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.entries) }
    }
}

impl Drop for RingMemory {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping that `map` created; no reference to it outlives `self`.
        unsafe { libc::munmap(self.first.as_ptr().cast(), mapped_bytes(self.entries)) };
    }
}

/// Length of the mapping: the entries, and one more page to detect the end of the ring.
fn mapped_bytes(entries: usize) -> usize {
    entries * ENTRY_BYTES + PAGE_SIZE
}
