//! One userfaultfd in MISSING mode, and for huge pages in MINOR mode too.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::OFlags;
use rustix::io::{Errno, FdFlags};
use vmferry_memory::userfaultfd::{self, UFFDIO_REGISTER_MODE_MINOR, UFFDIO_REGISTER_MODE_MISSING};
use vmferry_memory::{PAGE_SIZE, Slot};

use crate::message::MESSAGE_BYTES;
use crate::{Fault, FaultError, ioctl, open};

/// Missing pages of shared memory (Linux 4.11).
const UFFD_FEATURE_MISSING_SHMEM: u64 = 1 << 5;
/// Missing pages of hugetlbfs (Linux 4.11), and those that are not mapped (Linux 5.13).
const HUGE_PAGE_FEATURES: u64 = UFFD_FEATURE_MISSING_HUGETLBFS | UFFD_FEATURE_MINOR_HUGETLBFS;
const UFFD_FEATURE_MISSING_HUGETLBFS: u64 = 1 << 4;
const UFFD_FEATURE_MINOR_HUGETLBFS: u64 = 1 << 9;

/// Messages that are read by one system call: 2 KiB on the stack. Each thread that faults has one,
/// so more are rarely pending.
const MESSAGES: usize = 64;

/// A userfaultfd whose ranges have missing pages, all of one page size. It may be used by several
/// threads, and by another process than the owner of the memory.
///
/// When its last duplicate in any process is closed, the pages that are still missing read as
/// zeros.
#[derive(Debug)]
pub struct FaultDescriptor {
    userfaultfd: OwnedFd,
    page_bytes: u64,
}

/// The ioctls that a registered range supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeIoctls(u64);

impl RangeIoctls {
    /// Threads can be woken (`UFFDIO_WAKE`).
    #[must_use]
    pub fn wake(self) -> bool {
        self.has(2)
    }

    /// Pages can be placed (`UFFDIO_COPY`).
    #[must_use]
    pub fn copy(self) -> bool {
        self.has(3)
    }

    /// Pages of zeros can be placed without a buffer (`UFFDIO_ZEROPAGE`).
    #[must_use]
    pub fn zero_page(self) -> bool {
        self.has(4)
    }

    /// Pages that the file has can be mapped (`UFFDIO_CONTINUE`).
    #[must_use]
    pub fn map(self) -> bool {
        self.has(7)
    }

    fn has(self, number: u32) -> bool {
        self.0 & 1 << number != 0
    }
}

impl FaultDescriptor {
    /// Creates a userfaultfd of this process, for memory of this page size in bytes: 4096, or that
    /// of the huge pages on hugetlbfs ([`Slot::page_bytes`]).
    ///
    /// # Errors
    /// [`FaultError::Unavailable`] if this process may not handle the kernel's faults: that takes
    /// `CAP_SYS_PTRACE`, `vm.unprivileged_userfaultfd`, or a readable `/dev/userfaultfd`.
    pub fn open(page_bytes: u64) -> Result<Self, FaultError> {
        let descriptor = Self::of(open::create()?, page_bytes)?;
        descriptor.shake_hands()?;
        Ok(descriptor)
    }

    /// Takes a userfaultfd that was created elsewhere, such as by another process, and not set up
    /// yet (`UFFDIO_API`). It must not be one with `UFFD_USER_MODE_ONLY`, which can't be detected.
    ///
    /// # Errors
    /// [`FaultError::SetUp`], also if the descriptor was set up before.
    pub fn set_up(userfaultfd: OwnedFd, page_bytes: u64) -> Result<Self, FaultError> {
        let descriptor = Self::of(userfaultfd, page_bytes)?;
        descriptor.make_usable()?;
        descriptor.shake_hands()?;
        Ok(descriptor)
    }

    /// Takes a duplicate of a userfaultfd that was set up, and perhaps registered, elsewhere: that
    /// of a predecessor, or of the process that owns the memory. It becomes non-blocking for all
    /// who have a duplicate.
    ///
    /// # Errors
    /// [`FaultError::SetUp`].
    pub fn adopt(userfaultfd: OwnedFd, page_bytes: u64) -> Result<Self, FaultError> {
        let descriptor = Self::of(userfaultfd, page_bytes)?;
        descriptor.make_usable()?;
        Ok(descriptor)
    }

    fn of(userfaultfd: OwnedFd, page_bytes: u64) -> Result<Self, FaultError> {
        if !page_bytes.is_power_of_two() || page_bytes < PAGE_SIZE as u64 {
            return Err(FaultError::PageSize { page_bytes });
        }
        Ok(Self { userfaultfd, page_bytes })
    }

    fn shake_hands(&self) -> Result<(), FaultError> {
        let of_huge_pages = if self.has_huge_pages() { HUGE_PAGE_FEATURES } else { 0 };
        userfaultfd::set_up(&self.userfaultfd, UFFD_FEATURE_MISSING_SHMEM | of_huge_pages)
            .map_err(|source| FaultError::SetUp { action: "make the handshake", source })
    }

    /// `poll` reports an error for a blocking userfaultfd.
    fn make_usable(&self) -> Result<(), FaultError> {
        let failed =
            |errno: Errno| FaultError::SetUp { action: "set its flags", source: errno.into() };
        let flags = rustix::fs::fcntl_getfl(&self.userfaultfd).map_err(failed)?;
        rustix::fs::fcntl_setfl(&self.userfaultfd, flags | OFlags::NONBLOCK).map_err(failed)?;
        rustix::io::fcntl_setfd(&self.userfaultfd, FdFlags::CLOEXEC).map_err(failed)
    }

    /// A duplicate, such as to pass to another process. Each fault is reported to only one reader.
    ///
    /// # Errors
    /// [`FaultError::SetUp`] if no descriptor is left.
    pub fn try_clone(&self) -> Result<Self, FaultError> {
        let userfaultfd = self.userfaultfd.try_clone();
        let userfaultfd = userfaultfd
            .map_err(|source| FaultError::SetUp { action: "duplicate the descriptor", source })?;
        Ok(Self { userfaultfd, page_bytes: self.page_bytes })
    }

    /// Page size in bytes of its ranges, in whose units pages are placed.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    fn has_huge_pages(&self) -> bool {
        self.page_bytes > PAGE_SIZE as u64
    }

    /// Registers a slot's pages, all or some. From then on a thread that touches one that is not
    /// populated waits until it is placed.
    ///
    /// # Errors
    /// [`FaultError::OutOfSlot`], or as [`register_missing`](Self::register_missing).
    pub fn register_slot(&self, slot: &Slot, pages: Range<u64>) -> Result<RangeIoctls, FaultError> {
        if pages.start > pages.end || pages.end > slot.pages() {
            return Err(FaultError::OutOfSlot { slot: slot.id(), pages, length: slot.pages() });
        }
        let (start, page) = (slot.host_address() as u64, PAGE_SIZE as u64);
        let range = start + pages.start * page..start + pages.end * page;
        // SAFETY: the creator of a slot has promised that Rust holds no reference to its memory.
        unsafe { self.register_missing(&range) }
    }

    /// Registers a range of host-virtual addresses in the process that owns the memory, and returns
    /// what it supports. Huge pages that the file has wait too, if the page table lacks them.
    ///
    /// # Safety
    /// If the memory is this process's, Rust may hold no reference to it: its missing pages are
    /// filled at any time.
    ///
    /// # Errors
    /// [`FaultError::Unit`], [`FaultError::Register`] if the kernel refuses, and
    /// [`FaultError::NoCopy`] or [`FaultError::HugePages`] if pages can't be placed there; then
    /// nothing is registered.
    pub unsafe fn register_missing(&self, range: &Range<u64>) -> Result<RangeIoctls, FaultError> {
        self.check(range.start, range.end.saturating_sub(range.start))?;
        let (start, end) = (range.start, range.end);
        let minor = if self.has_huge_pages() { UFFDIO_REGISTER_MODE_MINOR } else { 0 };
        let mode = UFFDIO_REGISTER_MODE_MISSING | minor;
        // SAFETY: as the caller has promised.
        let ioctls = unsafe { userfaultfd::register(&self.userfaultfd, range, mode) };
        let ioctls = ioctls.map_err(|source| FaultError::Register {
            start,
            end,
            action: "registered",
            why: refusal(source.raw_os_error()),
            source,
        })?;
        let supports = RangeIoctls(ioctls);
        let has_all = supports.copy() && supports.wake();
        let problem = if !has_all || self.has_huge_pages() && !supports.map() {
            FaultError::NoCopy { start, end, ioctls }
        } else if !supports.zero_page() && !self.has_huge_pages() {
            // Only hugetlbfs lacks it.
            FaultError::HugePages { start, end, page_bytes: self.page_bytes }
        } else {
            return Ok(supports);
        };
        self.unregister(range)?;
        Err(problem)
    }

    /// Unregisters a range. Pages that are still missing read as zeros from then on, also to
    /// threads that wait.
    ///
    /// # Errors
    /// [`FaultError::Register`].
    pub fn unregister(&self, range: &Range<u64>) -> Result<(), FaultError> {
        userfaultfd::unregister(&self.userfaultfd, range).map_err(|source| FaultError::Register {
            start: range.start,
            end: range.end,
            action: "unregistered",
            why: refusal(source.raw_os_error()),
            source,
        })
    }

    /// Appends all pending faults to `into`, without waiting for one. To wait, poll the descriptor.
    /// `poll` does not report that the process that owns the memory has ended.
    ///
    /// # Errors
    /// [`FaultError::Read`]; [`FaultError::Event`] and [`FaultError::OtherMode`] if the descriptor
    /// was set up for more than missing pages.
    pub fn read_faults(&self, into: &mut Vec<Fault>) -> Result<(), FaultError> {
        let mut buffer = [MaybeUninit::uninit(); MESSAGES * MESSAGE_BYTES];
        loop {
            let bytes = match rustix::io::read(&self.userfaultfd, &mut buffer[..]) {
                Ok((bytes, _)) => bytes,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => continue,
                Err(errno) => {
                    let action = "read the userfaultfd";
                    return Err(FaultError::Read { action, source: errno.into() });
                }
            };
            let (messages, _) = bytes.as_chunks::<MESSAGE_BYTES>();
            for message in messages {
                into.push(Fault::decode(message)?);
            }
            if messages.len() < MESSAGES {
                return Ok(());
            }
        }
    }

    /// Makes the threads that wait in a range continue. Where the page is still missing they fault
    /// again, and the fault is reported again: a successor learns so of faults that its predecessor
    /// has read.
    ///
    /// # Errors
    /// [`FaultError::Wake`].
    pub fn wake(&self, range: &Range<u64>) -> Result<(), FaultError> {
        let (start, end) = (range.start, range.end);
        ioctl::wake(&self.userfaultfd, range).map_err(|source| FaultError::Wake {
            start,
            end,
            source,
        })
    }

    /// Checks that a range is a whole number of pages.
    pub(crate) fn check(&self, at: u64, bytes: u64) -> Result<(), FaultError> {
        let page_bytes = self.page_bytes;
        let is_whole = at.is_multiple_of(page_bytes) && bytes.is_multiple_of(page_bytes);
        if bytes > 0 && is_whole && at.checked_add(bytes).is_some() {
            return Ok(());
        }
        Err(FaultError::Unit { at, bytes, page_bytes })
    }
}

impl AsFd for FaultDescriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.userfaultfd.as_fd()
    }
}

impl From<FaultDescriptor> for OwnedFd {
    fn from(descriptor: FaultDescriptor) -> Self {
        descriptor.userfaultfd
    }
}

fn refusal(errno: Option<i32>) -> &'static str {
    match errno {
        Some(libc::EBUSY) => "another userfaultfd has a part of it",
        Some(libc::EINVAL) => "it is not mapped, or not as private or shared memory",
        Some(libc::EPERM) => "its file may not be written",
        Some(libc::ENOMEM) => "its process has ended, or no memory is left",
        _ => "the kernel refused",
    }
}
