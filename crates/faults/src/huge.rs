//! Huge pages that arrive in parts.
//!
//! `UFFDIO_COPY` places a huge page of hugetlbfs only as a whole. So the parts are written through
//! another mapping of the file, where no thread of the guest sees them, and the huge page is mapped
//! for the guest (`UFFDIO_CONTINUE`) once it is complete. Nothing is freed: a hole in the file
//! would return the huge page and its reservation to the pool, and another process might take it.

use std::ops::Range;

use vmferry_memory::{GuestMemory, MemoryError, PAGE_SIZE, PageRun, SlotId};

use crate::{FaultDescriptor, FaultError, FaultRange, FaultRanges, Wake, ioctl};

impl FaultDescriptor {
    /// Maps huge pages at an address range that the file has, unless they are mapped, and wakes the
    /// threads that wait. Returns `false` at the first that the file lacks.
    fn map(&self, range: &Range<u64>) -> Result<bool, FaultError> {
        let mut rest = range.clone();
        while rest.start < rest.end {
            let at = rest.start;
            let error = match ioctl::map(self, &rest, Wake::Now) {
                Ok(bytes) => {
                    rest.start += bytes;
                    continue;
                }
                Err(error) => error,
            };
            match error.raw_os_error() {
                Some(libc::EEXIST) => {
                    rest.start += self.page_bytes();
                    // Mapped in a way that wakes nobody.
                    self.wake(&(at..rest.start))?;
                }
                Some(libc::EFAULT) => return Ok(false),
                _ => self.may_retry(at, error)?,
            }
        }
        Ok(true)
    }
}

impl FaultRanges {
    /// Checks that this process may register its own memory, and that the kernel can
    /// [hide](Self::hide) its huge pages. Changes no content, and registers nothing.
    ///
    /// # Errors
    /// As [`FaultDescriptor::open`] and [`hide`](Self::hide).
    pub fn check(memory: &GuestMemory) -> Result<(), FaultError> {
        for slot in memory.slots() {
            let page_bytes = slot.page_bytes().map_err(|source| FaultError::Backing { source })?;
            FaultDescriptor::open(page_bytes)?;
            if slot.has_huge_pages() {
                let run =
                    PageRun { slot: slot.id(), first: 0, pages: page_bytes / PAGE_SIZE as u64 };
                memory.unmap_pages(run).map_err(hidden(run, "hidden"))?;
            }
        }
        Ok(())
    }

    /// Number of pages of a slot that are mapped together: 1, or on hugetlbfs those of a huge page.
    /// Then pages are not [placed](Self::place) but [hidden](Self::hide),
    /// [written](Self::write_hidden) and [shown](Self::show).
    #[must_use]
    pub fn unit_pages(&self, slot: SlotId) -> u64 {
        let range = self.ranges().iter().find(|range| range.slot == slot);
        range.map_or(1, |range| range.descriptor.page_bytes() / PAGE_SIZE as u64)
    }

    /// Hides whole huge pages from the guest: a thread that touches one waits until it is shown.
    /// Their content stays. Memory of another process must have been hidden by that process.
    ///
    /// # Errors
    /// [`FaultError::Hidden`]; on Linux before 5.18, too.
    pub fn hide(&self, run: PageRun) -> Result<(), FaultError> {
        match &self.memory {
            Some(memory) => memory.unmap_pages(run).map_err(hidden(run, "hidden")),
            None => Ok(()),
        }
    }

    /// Writes pages of hidden huge pages, where the guest doesn't see them: zeros without
    /// `content`.
    ///
    /// # Errors
    /// [`FaultError::Hidden`], also if the ranges have no huge pages.
    pub fn write_hidden(&self, run: PageRun, content: Option<&[u8]>) -> Result<(), FaultError> {
        let second = self.second_mapping(run)?;
        let written = match content {
            Some(content) => second.copy_in(run, content),
            None => second.zero(run),
        };
        written.map_err(hidden(run, "written"))
    }

    /// Shows whole huge pages to the guest, and wakes the threads that wait. One that the file
    /// lacks is made of zeros; returns whether there was one.
    ///
    /// # Errors
    /// [`FaultError::NoRange`]; [`FaultError::Hidden`]; as [`FaultDescriptor::place`].
    pub fn show(&self, run: PageRun) -> Result<bool, FaultError> {
        let mut lacked = false;
        self.each_part(run, |range, part| {
            let at = range.address(part.start)..range.address(part.end);
            while !range.descriptor.map(&at)? {
                self.second_mapping(run)?.populate(run).map_err(hidden(run, "populated"))?;
                lacked = true;
            }
            Ok(())
        })?;
        Ok(lacked)
    }

    /// `memory` is another mapping of the same files, such as this process's of another one's
    /// memory. Hidden pages are written there.
    #[must_use]
    pub fn with_second_mapping(mut self, memory: GuestMemory) -> Self {
        self.second = Some(memory);
        self
    }

    fn second_mapping(&self, run: PageRun) -> Result<&GuestMemory, FaultError> {
        self.second.as_ref().ok_or(FaultError::NoRange { run })
    }
}

impl FaultRange {
    /// The address of a page of the slot that the range has.
    pub(crate) fn address(&self, page: u64) -> u64 {
        self.addresses.start + (page - self.first_page) * PAGE_SIZE as u64
    }
}

fn hidden(run: PageRun, action: &'static str) -> impl Fn(MemoryError) -> FaultError {
    move |source| FaultError::Hidden { run, action, source }
}
