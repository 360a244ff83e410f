//! Copies of guest data outside guest memory: frames, copies of pages, device state.
//!
//! They have mappings of their own, which are excluded from core dumps. A buffer from the allocator
//! would not do: `madvise` applies to whole pages, and the allocator uses the rest of a page for
//! other data.
//!
//! The invariants that `unsafe` relies on: `begin` is the first byte of a mapping of `capacity`
//! bytes, readable, writable, private to this value and zeroed by the kernel when it is created; it
//! dangles while `capacity` is 0. `length` is at most `written`, which is at most `capacity`. Bytes
//! from `written` on are zero.

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use rustix::mm::{
    Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap_anonymous, mremap, munmap,
};

/// Minimum size of a mapping. The table of a frame fits in it.
const LEAST_BYTES: usize = 16 << 10;

/// A byte buffer that is excluded from core dumps. Its pages are populated on first access.
pub struct GuestBytes {
    begin: NonNull<u8>,
    capacity: usize,
    length: usize,
    /// The greatest length so far.
    written: usize,
}

// SAFETY: the value owns its mapping, as a `Vec` owns its buffer.
unsafe impl Send for GuestBytes {}
// SAFETY: a shared reference only reads.
unsafe impl Sync for GuestBytes {}

impl GuestBytes {
    /// An empty buffer without a mapping.
    #[must_use]
    pub const fn new() -> Self {
        Self { begin: NonNull::dangling(), capacity: 0, length: 0, written: 0 }
    }

    /// Returns a buffer of `length` zeros; `None` if the system refuses the address space.
    #[must_use]
    pub fn zeroed(length: usize) -> Option<Self> {
        if length == 0 {
            return Some(Self::new());
        }
        let capacity = length.max(LEAST_BYTES).checked_next_multiple_of(crate::PAGE_SIZE)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses a range where nothing is mapped.
        let mapped =
            unsafe { mmap_anonymous(std::ptr::null_mut(), capacity, protection, flags) }.ok()?;
        let begin = NonNull::new(mapped.cast())?;
        let bytes = Self { begin, capacity, length, written: length };
        // SAFETY: the range is the whole mapping, and the advice changes no content.
        unsafe { madvise(mapped, capacity, Advice::LinuxDontDump) }.ok()?;
        Some(bytes)
    }

    /// Extends the buffer to at least `length` bytes. New bytes are zero.
    ///
    /// # Panics
    /// Aborts the process if the system has no address space left, as a `Vec` does.
    pub fn extend_to(&mut self, length: usize) {
        if length <= self.length {
            return;
        }
        let (begin, stale) = (self.length, self.written.min(length));
        self.reserve_to(length);
        self.length = length;
        self.written = self.written.max(length);
        if begin < stale {
            self[begin..stale].fill(0);
        }
    }

    /// Appends bytes.
    ///
    /// # Panics
    /// As [`extend_to`](Self::extend_to).
    #[inline]
    pub fn extend_from_slice(&mut self, bytes: &[u8]) {
        let begin = self.length;
        let length = begin.saturating_add(bytes.len());
        self.reserve_to(length);
        self.length = length;
        self.written = self.written.max(length);
        self[begin..].copy_from_slice(bytes);
    }

    /// Shortens the buffer to at most `length` bytes. Its memory is kept.
    #[inline]
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
    }

    /// Empties the buffer. Its memory is kept.
    #[inline]
    pub fn clear(&mut self) {
        self.length = 0;
    }

    /// Appends bytes from `reader` until its end, but at most `most` bytes. Returns the number of
    /// bytes appended.
    ///
    /// # Errors
    /// The reader's. Bytes read before the error are kept.
    pub fn read_to_end(&mut self, reader: &mut impl io::Read, most: usize) -> io::Result<usize> {
        let begin = self.length;
        while self.length - begin < most {
            let filled = self.length;
            let room = (filled - begin).max(LEAST_BYTES).min(most - (filled - begin));
            self.extend_to(filled + room);
            let read = reader.read(&mut self[filled..]);
            self.truncate(filled + read.as_ref().map_or(0, |read| *read));
            match read {
                Ok(0) => break,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(self.length - begin)
    }

    /// Reserves capacity for `length` bytes.
    #[inline]
    fn reserve_to(&mut self, length: usize) {
        if length > self.capacity {
            self.grow(length);
        }
    }

    #[cold]
    fn grow(&mut self, length: usize) {
        let wanted = length.max(self.capacity.saturating_mul(2));
        if self.try_grow(wanted).is_none() {
            let layout = std::alloc::Layout::array::<u8>(length);
            std::alloc::handle_alloc_error(layout.unwrap_or(std::alloc::Layout::new::<u8>()));
        }
    }

    /// Moves the pages to a larger mapping, which stays excluded from core dumps. Moving avoids a
    /// second copy of the data.
    fn try_grow(&mut self, wanted: usize) -> Option<()> {
        if self.capacity == 0 {
            *self = Self::zeroed(wanted)?;
            (self.length, self.written) = (0, 0);
            return Some(());
        }
        let capacity = wanted.checked_next_multiple_of(crate::PAGE_SIZE)?;
        let (begin, flags) = (self.begin.as_ptr().cast(), MremapFlags::MAYMOVE);
        // SAFETY: the range is the whole mapping, and `self` is borrowed exclusively, so nothing
        // else refers to it. The bytes that the kernel adds are zero.
        let moved = unsafe { mremap(begin, self.capacity, capacity, flags) }.ok()?;
        self.begin = NonNull::new(moved.cast())?;
        self.capacity = capacity;
        Some(())
    }
}

impl From<&[u8]> for GuestBytes {
    fn from(bytes: &[u8]) -> Self {
        let mut copy = Self::new();
        copy.extend_from_slice(bytes);
        copy
    }
}

impl<const N: usize> From<[u8; N]> for GuestBytes {
    fn from(bytes: [u8; N]) -> Self {
        Self::from(&bytes[..])
    }
}

impl Clone for GuestBytes {
    fn clone(&self) -> Self {
        Self::from(&self[..])
    }
}

impl PartialEq for GuestBytes {
    fn eq(&self, other: &Self) -> bool {
        self[..] == other[..]
    }
}

impl Eq for GuestBytes {}

impl io::Write for GuestBytes {
    #[inline]
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
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
        // SAFETY: see the top of the file; nothing writes while this is borrowed.
        unsafe { std::slice::from_raw_parts(self.begin.as_ptr(), self.length) }
    }
}

impl DerefMut for GuestBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: see the top of the file; nothing else reads or writes while this is borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.begin.as_ptr(), self.length) }
    }
}

impl Drop for GuestBytes {
    fn drop(&mut self) {
        if self.capacity > 0 {
            // SAFETY: the range is the whole mapping, and nothing refers to it any more. Unmapping
            // it does not fail.
            let _ = unsafe { munmap(self.begin.as_ptr().cast(), self.capacity) };
        }
    }
}

impl fmt::Debug for GuestBytes {
    /// Prints the length, not the guest's data.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GuestBytes({})", self.length)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn empty_guest_bytes_have_no_mapping() {
        let mut bytes = GuestBytes::zeroed(0).unwrap();
        assert!(bytes.is_empty() && bytes.capacity == 0);
        bytes.extend_to(0);
        assert_eq!(bytes.capacity, 0);
        assert!(GuestBytes::zeroed(usize::MAX - 5).is_none());
    }

    /// One operation on a buffer.
    #[derive(Clone, Debug)]
    enum Step {
        ExtendTo(usize, u8),
        Append(Vec<u8>),
        Truncate(usize),
        Clear,
        Read(Vec<u8>, usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        let some = || prop::collection::vec(any::<u8>(), 0..40_000);
        prop_oneof![
            (0_usize..100_000, any::<u8>()).prop_map(|(length, last)| Step::ExtendTo(length, last)),
            some().prop_map(Step::Append),
            (0_usize..100_000).prop_map(Step::Truncate),
            Just(Step::Clear),
            (some(), 0_usize..50_000).prop_map(|(bytes, most)| Step::Read(bytes, most)),
        ]
    }

    proptest! {
        /// Compares with a `Vec` that is resized with zeros, written to, appended to and truncated.
        #[test]
        fn guest_bytes_behave_like_a_vec(steps in prop::collection::vec(step(), 1..20)) {
            let (mut bytes, mut twin) = (GuestBytes::new(), Vec::new());
            for step in steps {
                match step {
                    Step::ExtendTo(length, last) => {
                        bytes.extend_to(length);
                        twin.resize(length.max(twin.len()), 0);
                        if let Some(at) = length.checked_sub(1) {
                            (bytes[at], twin[at]) = (last, last);
                        }
                    }
                    Step::Append(more) => {
                        bytes.extend_from_slice(&more);
                        twin.extend_from_slice(&more);
                    }
                    Step::Truncate(length) => {
                        bytes.truncate(length);
                        twin.truncate(length);
                    }
                    Step::Clear => {
                        bytes.clear();
                        twin.clear();
                    }
                    Step::Read(from, most) => {
                        let read = bytes.read_to_end(&mut &from[..], most).unwrap();
                        prop_assert_eq!(read, from.len().min(most));
                        twin.extend_from_slice(&from[..read]);
                    }
                }
                prop_assert!(bytes[..] == twin[..]);
                prop_assert!(bytes.length <= bytes.written && bytes.written <= bytes.capacity);
                prop_assert!(bytes == bytes.clone() && bytes == GuestBytes::from(&twin[..]));
            }
        }
    }
}
