//! Placing missing pages.

use std::io;
use std::ops::Range;

use vmferry_memory::PAGE_SIZE;

use crate::{FaultDescriptor, FaultError, ioctl};

/// When the threads that wait at a page continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// As soon as the page is placed.
    Now,
    /// When the caller wakes the range ([`FaultDescriptor::wake`]), once for several batches. Until
    /// then, threads that wait at these pages go on waiting, although the pages are there.
    Later,
}

/// What happened to a range of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The pages were missing and are placed.
    Placed,
    /// The pages existed, and were not changed.
    AlreadyThere,
}

/// What happened to all pages of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// Bytes that were missing and are placed.
    pub placed_bytes: u64,
    /// Bytes that existed, and were not changed.
    pub present_bytes: u64,
}

impl Placement {
    pub(crate) fn add(&mut self, range: &Range<u64>, outcome: Outcome) {
        let bytes = range.end - range.start;
        match outcome {
            Outcome::Placed => self.placed_bytes += bytes,
            Outcome::AlreadyThere => self.present_bytes += bytes,
        }
    }
}

impl FaultDescriptor {
    /// Places pages at consecutive host-virtual addresses from `at` on. Pages that exist already
    /// are left alone.
    ///
    /// # Errors
    /// [`FaultError::Unit`] unless address and length are multiples of
    /// [`page_bytes`](Self::page_bytes); [`FaultError::ProcessGone`];
    /// [`FaultError::NotRegistered`]; [`FaultError::Place`], such as if no memory is left. Pages
    /// before the one that the error names are placed.
    pub fn place(&self, at: u64, pages: &[u8], wake: Wake) -> Result<Placement, FaultError> {
        let mut placement = Placement::default();
        self.place_each(at, pages, wake, |range, outcome| placement.add(&range, outcome))?;
        Ok(placement)
    }

    /// The same, and calls `each` with the ranges of addresses that had the same outcome, in
    /// ascending order.
    ///
    /// # Errors
    /// As [`place`](Self::place).
    pub fn place_each(
        &self,
        at: u64,
        pages: &[u8],
        wake: Wake,
        each: impl FnMut(Range<u64>, Outcome),
    ) -> Result<(), FaultError> {
        let bytes = pages.len() as u64;
        self.check(at, bytes)?;
        self.fill(at..at + bytes, wake, each, |rest| {
            ioctl::copy(self, rest.start, &pages[(rest.start - at) as usize..], wake)
        })
    }

    /// Places pages of zeros. They take no memory in private memory until they are written. On
    /// hugetlbfs, which has no such request, zeros are copied.
    ///
    /// # Errors
    /// As [`place`](Self::place).
    pub fn place_zeros(&self, range: &Range<u64>, wake: Wake) -> Result<Placement, FaultError> {
        let mut placement = Placement::default();
        let each = |range: Range<u64>, outcome| placement.add(&range, outcome);
        self.check(range.start, range.end.saturating_sub(range.start))?;
        if self.page_bytes() == PAGE_SIZE as u64 {
            self.fill(range.clone(), wake, each, |rest| ioctl::zero_page(self, rest, wake))?;
        } else {
            // Zeroed memory of the allocator: reading it takes no page.
            let zeros = vec![0; self.page_bytes() as usize];
            self.fill(range.clone(), wake, each, |rest| {
                ioctl::copy(self, rest.start, &zeros, wake)
            })?;
        }
        Ok(placement)
    }

    /// Calls `place` with what is left of a range until nothing is. It returns the bytes that it
    /// has placed from the start.
    fn fill(
        &self,
        range: Range<u64>,
        wake: Wake,
        mut each: impl FnMut(Range<u64>, Outcome),
        place: impl Fn(&Range<u64>) -> io::Result<u64>,
    ) -> Result<(), FaultError> {
        let mut rest = range;
        while rest.start < rest.end {
            let at = rest.start;
            let error = match place(&rest) {
                Ok(bytes) => {
                    rest.start += bytes;
                    each(at..rest.start, Outcome::Placed);
                    continue;
                }
                Err(error) => error,
            };
            match error.raw_os_error() {
                Some(libc::EEXIST) => {
                    rest.start += self.page_bytes();
                    let page = at..rest.start;
                    if wake == Wake::Now {
                        // The page may have come in a way that wakes nobody.
                        self.wake(&page)?;
                    }
                    each(page, Outcome::AlreadyThere);
                }
                _ => self.may_retry(at, error)?,
            }
        }
        Ok(())
    }

    /// Returns at once if a page could not be placed only because the process is changing its
    /// mappings.
    pub(crate) fn may_retry(&self, at: u64, error: io::Error) -> Result<(), FaultError> {
        match error.raw_os_error() {
            Some(libc::EAGAIN) => std::thread::yield_now(),
            Some(libc::ESRCH) => return Err(FaultError::ProcessGone { at }),
            Some(libc::ENOENT) => return Err(FaultError::NotRegistered { at }),
            _ => return Err(FaultError::Place { at, source: error }),
        }
        Ok(())
    }
}
