//! Copies of what a guest knows, outside its memory: frames, copies of pages, device state.
//!
//! They have mappings of their own, which the kernel leaves out of core dumps. A buffer from the
//! allocator would not do: what is asked of the kernel counts for whole pages, and the allocator
//! gives their neighbours to others.
//!
//! The rules that `unsafe` upholds here: `begin` is the first byte of a mapping of `capacity`
//! bytes, readable, writable, private to this value and zeroed by the kernel when it is made, or
//! dangles while `capacity` is 0; `length` is at most `capacity`.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Least size of a mapping: the table of a frame fits in.
const LEAST_BYTES: usize = 16 << 10;

/// Bytes that are in no core dump. They are populated when they are touched.
pub struct GuestBytes {
    begin: NonNull<u8>,
    capacity: usize,
    length: usize,
}

// SAFETY: it owns its mapping, as a `Vec` owns its buffer.
unsafe impl Send for GuestBytes {}
// SAFETY: a shared reference only reads.
unsafe impl Sync for GuestBytes {}

impl GuestBytes {
    /// None, and no mapping.
    #[must_use]
    pub const fn new() -> Self {
        Self { begin: NonNull::dangling(), capacity: 0, length: 0 }
    }

    /// Returns `length` zeros; `None` if the system refuses the address space.
    #[must_use]
    pub fn zeroed(length: usize) -> Option<Self> {
        if length == 0 {
            return Some(Self::new());
        }
        let capacity = length.max(LEAST_BYTES).checked_next_multiple_of(crate::PAGE_SIZE)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses a range that nothing is mapped in.
        let mapped =
            unsafe { mmap_anonymous(std::ptr::null_mut(), capacity, protection, flags) }.ok()?;
        let begin = NonNull::new(mapped.cast())?;
        let bytes = Self { begin, capacity, length };
        // SAFETY: the range is this mapping, whole, and the advice changes no content.
        unsafe { madvise(mapped, capacity, Advice::LinuxDontDump) }.ok()?;
        Some(bytes)
    }

    /// Makes it at least so long; what is new is zero.
    ///
    /// # Panics
    /// Ends the process where the system has no address space left, as a `Vec` does.
    pub fn extend_to(&mut self, length: usize) {
        if length <= self.length {
            return;
        }
        if length > self.capacity {
            let wanted = length.max(self.capacity.saturating_mul(2));
            let Some(mut longer) = Self::zeroed(wanted) else {
                let layout = std::alloc::Layout::array::<u8>(length);
                std::alloc::handle_alloc_error(layout.unwrap_or(std::alloc::Layout::new::<u8>()));
            };
            longer[..self.length].copy_from_slice(self);
            *self = longer;
        }
        self.length = length;
    }
}

impl Default for GuestBytes {
    fn default() -> Self {
        Self::new()
    }
}

impl Deref for GuestBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: see the top of the file; nobody writes while this is borrowed.
        unsafe { std::slice::from_raw_parts(self.begin.as_ptr(), self.length) }
    }
}

impl DerefMut for GuestBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: see the top of the file; nobody else reads or writes while this is borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.begin.as_ptr(), self.length) }
    }
}

impl Drop for GuestBytes {
    fn drop(&mut self) {
        if self.capacity > 0 {
            // SAFETY: the range is this mapping, whole, and nothing refers to it any more.
            // Unmapping it does not fail.
            let _ = unsafe { munmap(self.begin.as_ptr().cast(), self.capacity) };
        }
    }
}

impl fmt::Debug for GuestBytes {
    /// Says how many, and not what a guest knows.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GuestBytes({})", self.length)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn guest_bytes_without_any_have_no_mapping() {
        let mut bytes = GuestBytes::zeroed(0).unwrap();
        assert!(bytes.is_empty() && bytes.capacity == 0);
        bytes.extend_to(0);
        assert_eq!(bytes.capacity, 0);
        assert!(GuestBytes::zeroed(usize::MAX - 5).is_none());
    }

    proptest! {
        /// As a `Vec` that is resized with zeros, and written to.
        #[test]
        fn guest_bytes_are_what_a_vec_is(
            steps in prop::collection::vec((0_usize..100_000, any::<u8>()), 1..20),
        ) {
            let (mut bytes, mut twin) = (GuestBytes::new(), Vec::new());
            for (length, byte) in steps {
                bytes.extend_to(length);
                if twin.len() < length {
                    twin.resize(length, 0);
                }
                if let Some(last) = length.checked_sub(1) {
                    (bytes[last], twin[last]) = (byte, byte);
                }
                prop_assert!(bytes[..] == twin[..]);
            }
        }
    }
}
