//! Errors of missing pages.

use std::fmt;
use std::io;
use std::ops::Range;

use vmferry_memory::{MemoryError, PageRun, SlotId};

/// An error about missing pages. Addresses are host-virtual, in the process that owns the memory.
#[derive(Debug, thiserror::Error)]
pub enum FaultError {
    /// This process may not handle the kernel's faults, or the kernel has no userfaultfd.
    #[error("userfaultfd(2) failed, and so did /dev/userfaultfd ({device}); {remedy}")]
    Unavailable {
        /// The error of the system call.
        #[source]
        system_call: io::Error,
        /// The error of the device.
        device: io::Error,
        /// What the administrator can do.
        remedy: Remedy,
    },
    /// A descriptor that was created elsewhere can't be used.
    #[error("a userfaultfd could not be set up: could not {action}")]
    SetUp {
        /// The operation.
        action: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A page size that no memory has.
    #[error("{page_bytes} bytes are no page size: it is a power of two of at least 4096")]
    PageSize {
        /// The requested size.
        page_bytes: u64,
    },
    /// The page size of a slot is not known.
    #[error("the page size of the memory could not be determined")]
    Backing {
        /// The error of the slot's file.
        #[source]
        source: io::Error,
    },
    /// An address or a length that is not a whole number of pages.
    #[error("{bytes} bytes at {at:#x} are no range of whole pages of {page_bytes} bytes")]
    Unit {
        /// The address.
        at: u64,
        /// The length.
        bytes: u64,
        /// The page size of the memory: that of a huge page on hugetlbfs.
        page_bytes: u64,
    },
    /// The kernel refused to register or unregister a range.
    #[error("the memory at {start:#x}..{end:#x} could not be {action}: {why}")]
    Register {
        /// First address.
        start: u64,
        /// First address after the range.
        end: u64,
        /// `registered` or `unregistered`.
        action: &'static str,
        /// The meaning of the error.
        why: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A range in which pages can't be placed.
    #[error(
        "pages can't be placed at {start:#x}..{end:#x}: the kernel offers only the ioctls \
         {ioctls:#x} there"
    )]
    NoCopy {
        /// First address.
        start: u64,
        /// First address after the range.
        end: u64,
        /// The ioctls of the range, one bit for each number.
        ioctls: u64,
    },
    /// A range on hugetlbfs, which was registered as one of small pages.
    #[error(
        "the memory at {start:#x}..{end:#x} is on hugetlbfs, where only whole huge pages can be \
         placed, and not pages of {page_bytes} bytes"
    )]
    HugePages {
        /// First address.
        start: u64,
        /// First address after the range.
        end: u64,
        /// The page size that was expected.
        page_bytes: u64,
    },
    /// Memory on hugetlbfs could not be mapped once more.
    #[error("the huge pages could not be mapped a second time, to write their parts")]
    MapAgain {
        /// The error.
        #[source]
        source: MemoryError,
    },
    /// An operation on the parts of huge pages failed.
    #[error("{run} of memory on hugetlbfs could not be {action}")]
    Hidden {
        /// The pages.
        run: PageRun,
        /// Such as `written`.
        action: &'static str,
        /// The error.
        #[source]
        source: MemoryError,
    },
    /// Ranges of one guest that overlap.
    #[error("two ranges of missing pages overlap at {at:#x}")]
    Overlap {
        /// The first address of the overlap.
        at: u64,
    },
    /// Pages that a slot does not have.
    #[error("pages {} to {} are not within the {length} pages of {slot}", pages.start, pages.end)]
    OutOfSlot {
        /// The slot.
        slot: SlotId,
        /// The pages.
        pages: Range<u64>,
        /// Number of pages in the slot.
        length: u64,
    },
    /// A run of pages that no range has.
    #[error("no descriptor has {run}")]
    NoRange {
        /// The run.
        run: PageRun,
    },
    /// A buffer whose length differs from the run's.
    #[error("a buffer of {bytes} bytes does not hold {run}")]
    BufferLength {
        /// The run.
        run: PageRun,
        /// Bytes in the buffer.
        bytes: usize,
    },
    /// Faults could not be read.
    #[error("faults could not be read: could not {action}")]
    Read {
        /// The operation.
        action: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// An event that was not requested: the descriptor was set up elsewhere for more than faults.
    #[error("the userfaultfd reports {name} ({event:#x}), which was not requested")]
    Event {
        /// Its number.
        event: u8,
        /// Its name in the kernel's header.
        name: &'static str,
    },
    /// A fault at a page that is not missing: the range is registered for another mode too.
    #[error("the fault at {address:#x} is not at a missing page (flags {flags:#x})")]
    OtherMode {
        /// The address.
        address: u64,
        /// `UFFD_PAGEFAULT_FLAG_*`.
        flags: u64,
    },
    /// The process that owns the memory has ended.
    #[error("the page at {at:#x} has no owner: the process has ended, or runs another program now")]
    ProcessGone {
        /// The address.
        at: u64,
    },
    /// The memory was unmapped, mapped again, or unregistered.
    #[error("the page at {at:#x} can't be placed: it is not mapped or not registered any more")]
    NotRegistered {
        /// The address.
        at: u64,
    },
    /// The kernel refused to place pages.
    #[error("the page at {at:#x} could not be placed")]
    Place {
        /// The address.
        at: u64,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The kernel refused to wake threads.
    #[error("the threads that wait at {start:#x}..{end:#x} could not be woken")]
    Wake {
        /// First address.
        start: u64,
        /// First address after the range.
        end: u64,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// What makes userfaultfd available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// The process lacks a permission.
    Permit,
    /// The kernel lacks userfaultfd, or a filter of system calls hides it.
    Kernel,
    /// The process or the host lacks descriptors or memory.
    Resources,
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Permit => {
                "let this user read /dev/userfaultfd, set vm.unprivileged_userfaultfd to 1, or \
                 grant CAP_SYS_PTRACE"
            }
            Self::Kernel => {
                "use a kernel with CONFIG_USERFAULTFD, and permit the call in the filter of \
                 system calls"
            }
            Self::Resources => "raise the limit of open files, or free memory",
        })
    }
}
