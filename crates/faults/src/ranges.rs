//! The missing pages of a whole guest, divided between several descriptors.
//!
//! All threads that wait at one userfaultfd share the lock of its wait queue, and one thread reads
//! its faults. So each slot can be divided into ranges with a descriptor each. Where guest and
//! handlers share two cores, this does not raise the rate of faults, but halves the median wait of
//! 64 threads and lengthens the longest ones (`vmferry-bench faults`).

use std::ops::Range;

use vmferry_memory::{GuestMemory, PAGE_SIZE, PageRun, Slot, SlotId};

use crate::place::{Placement, Wake};
use crate::{FaultDescriptor, FaultError};

const PAGE: u64 = PAGE_SIZE as u64;

/// Ranges begin at multiples of this, 2 MiB, so that no huge page is in two of them.
const ALIGN_PAGES: u64 = 512;

/// A part of a slot whose missing pages one descriptor serves.
#[derive(Debug)]
pub struct FaultRange {
    /// The slot.
    pub slot: SlotId,
    /// The page of the slot that is at the range's start.
    pub first_page: u64,
    /// Host-virtual addresses in the process that owns the memory.
    pub addresses: Range<u64>,
    /// The share that it belongs to: one handler thread serves all ranges of a share.
    pub share: usize,
    /// The descriptor with which it is registered.
    pub descriptor: FaultDescriptor,
}

impl FaultRange {
    /// The pages of the slot in this range.
    #[must_use]
    pub fn pages(&self) -> Range<u64> {
        self.first_page..self.first_page + (self.addresses.end - self.addresses.start) / PAGE
    }

    /// The page of the slot at an address of the range.
    #[must_use]
    pub fn page_at(&self, address: u64) -> u64 {
        self.first_page + address.saturating_sub(self.addresses.start) / PAGE
    }
}

/// The registered ranges of a guest's memory.
///
/// ```
/// use vmferry_faults::{FaultRanges, Wake};
/// use vmferry_memory::{GuestMemory, MemoryKind, PageRun, SlotId, SlotLayout};
///
/// let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: 1024 }];
/// let memory = GuestMemory::allocate(&layout, MemoryKind::Memfd)?;
/// let ranges = FaultRanges::register(&memory, 2)?;
///
/// // A thread that touched page 700 now would wait.
/// let page = PageRun { slot: SlotId(0), first: 700, pages: 1 };
/// ranges.place(page, &[7; 4096], Wake::Now)?;
/// let mut byte = [0];
/// memory.read_at(700 << 12, &mut byte)?;
/// assert_eq!(byte, [7]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct FaultRanges {
    /// By ascending address.
    ranges: Vec<FaultRange>,
    shares: usize,
    /// The memory, if it is this process's. Keeps it mapped.
    pub(crate) memory: Option<GuestMemory>,
    /// Another mapping of the same files, to write parts of huge pages.
    pub(crate) second: Option<GuestMemory>,
}

impl FaultRanges {
    /// Divides each slot of this process's memory into `shares` ranges of about the same length,
    /// fewer if it is short, and registers each with a descriptor of its own. Each range is a
    /// mapping of its own in `/proc/PID/maps` while it is registered. Files of huge pages are
    /// mapped once more, to write their parts.
    ///
    /// # Errors
    /// As [`FaultDescriptor::open`] and [`FaultDescriptor::register_missing`]; then nothing is
    /// registered.
    pub fn register(memory: &GuestMemory, shares: usize) -> Result<Self, FaultError> {
        let mut ranges = Vec::new();
        for slot in memory.slots() {
            let page_bytes = slot.page_bytes().map_err(|source| FaultError::Backing { source })?;
            for (share, pages) in divide(slot, page_bytes, shares).enumerate() {
                let descriptor = FaultDescriptor::open(page_bytes)?;
                descriptor.register_slot(slot, pages.clone())?;
                let start = slot.host_address() as u64;
                ranges.push(FaultRange {
                    slot: slot.id(),
                    first_page: pages.start,
                    addresses: start + pages.start * PAGE..start + pages.end * PAGE,
                    share,
                    descriptor,
                });
            }
        }
        let has_huge_pages = ranges.iter().any(|range| range.descriptor.page_bytes() > PAGE);
        let second = has_huge_pages.then(|| memory.map_again()).transpose();
        let second = second.map_err(|source| FaultError::MapAgain { source })?;
        Ok(Self { memory: Some(memory.clone()), second, ..Self::of(ranges)? })
    }

    /// Registers whole slots, in the memory of the process that has created the descriptor, as one
    /// share. Each is at these host-virtual addresses.
    ///
    /// # Safety
    /// As [`FaultDescriptor::register_missing`].
    ///
    /// # Errors
    /// As [`of`](Self::of) and [`FaultDescriptor::register_missing`]; then nothing is registered.
    pub unsafe fn register_blocks(
        blocks: &[(SlotId, Range<u64>)],
        descriptor: &FaultDescriptor,
    ) -> Result<Self, FaultError> {
        let mut ranges = Vec::new();
        for (slot, addresses) in blocks {
            // SAFETY: as the caller has promised.
            let registered = unsafe { descriptor.register_missing(addresses) };
            if let Err(error) = registered {
                // The error that counts is the first one.
                let _ = Self::of(ranges).and_then(|ranges| ranges.unregister());
                return Err(error);
            }
            ranges.push(FaultRange {
                slot: *slot,
                first_page: 0,
                addresses: addresses.clone(),
                share: 0,
                descriptor: descriptor.try_clone()?,
            });
        }
        Self::of(ranges)
    }

    /// Takes ranges that were registered elsewhere.
    ///
    /// # Errors
    /// [`FaultError::Overlap`]; [`FaultError::Unit`] for a range that is no whole number of its
    /// descriptor's pages.
    pub fn of(mut ranges: Vec<FaultRange>) -> Result<Self, FaultError> {
        ranges.sort_by_key(|range| range.addresses.start);
        for range in &ranges {
            let Range { start, end } = range.addresses;
            range.descriptor.check(start, end.saturating_sub(start))?;
        }
        for pair in ranges.windows(2) {
            let at = pair[1].addresses.start;
            if at < pair[0].addresses.end {
                return Err(FaultError::Overlap { at });
            }
        }
        let shares = ranges.iter().map(|range| range.share + 1).max().unwrap_or_default();
        Ok(Self { ranges, shares, memory: None, second: None })
    }

    /// All ranges, by ascending address.
    #[must_use]
    pub fn ranges(&self) -> &[FaultRange] {
        &self.ranges
    }

    /// Number of shares: how many threads can handle faults without sharing a descriptor.
    #[must_use]
    pub fn shares(&self) -> usize {
        self.shares
    }

    /// The range that has an address, such as that of a fault.
    #[must_use]
    pub fn range_at(&self, address: u64) -> Option<&FaultRange> {
        let after = self.ranges.partition_point(|range| range.addresses.start <= address);
        let range = self.ranges.get(after.checked_sub(1)?)?;
        range.addresses.contains(&address).then_some(range)
    }

    /// Places the pages of a run, which may be in several ranges.
    ///
    /// # Errors
    /// [`FaultError::BufferLength`], [`FaultError::NoRange`], or as [`FaultDescriptor::place`].
    pub fn place(&self, run: PageRun, pages: &[u8], wake: Wake) -> Result<Placement, FaultError> {
        if run.pages.checked_mul(PAGE) != Some(pages.len() as u64) {
            return Err(FaultError::BufferLength { run, bytes: pages.len() });
        }
        let mut placement = Placement::default();
        self.each_part(run, |range, part| {
            let from = (part.start - run.first) * PAGE;
            let piece = &pages[from as usize..][..((part.end - part.start) * PAGE) as usize];
            let at = range.address(part.start);
            let each = |range: Range<u64>, outcome| placement.add(&range, outcome);
            range.descriptor.place_each(at, piece, wake, each)
        })?;
        Ok(placement)
    }

    /// Places a run of zero pages, which may be in several ranges.
    ///
    /// # Errors
    /// [`FaultError::NoRange`], or as [`FaultDescriptor::place`].
    pub fn place_zeros(&self, run: PageRun, wake: Wake) -> Result<Placement, FaultError> {
        let mut placement = Placement::default();
        self.each_part(run, |range, part| {
            let at = range.address(part.start)..range.address(part.end);
            let placed = range.descriptor.place_zeros(&at, wake)?;
            placement.placed_bytes += placed.placed_bytes;
            placement.present_bytes += placed.present_bytes;
            Ok(())
        })?;
        Ok(placement)
    }

    /// Wakes the threads that wait at the pages of a run.
    ///
    /// # Errors
    /// [`FaultError::NoRange`] or [`FaultError::Wake`].
    pub fn wake(&self, run: PageRun) -> Result<(), FaultError> {
        self.each_part(run, |range, part| {
            range.descriptor.wake(&(range.address(part.start)..range.address(part.end)))
        })
    }

    /// Wakes all threads that wait, so that a successor is told of all faults again.
    ///
    /// # Errors
    /// [`FaultError::Wake`].
    pub fn wake_all(&self) -> Result<(), FaultError> {
        self.ranges.iter().try_for_each(|range| range.descriptor.wake(&range.addresses))
    }

    /// Unregisters everything. Pages that are still missing read as zeros from then on.
    ///
    /// # Errors
    /// [`FaultError::Register`] for the first range that could not be unregistered; the others are.
    pub fn unregister(&self) -> Result<(), FaultError> {
        let done = self.ranges.iter().map(|range| range.descriptor.unregister(&range.addresses));
        done.fold(Ok(()), Result::and)
    }

    /// Calls `act` with the parts of a run, which must be registered without a gap.
    pub(crate) fn each_part(
        &self,
        run: PageRun,
        mut act: impl FnMut(&FaultRange, Range<u64>) -> Result<(), FaultError>,
    ) -> Result<(), FaultError> {
        let mut next = run.first;
        let end = run.first.checked_add(run.pages).ok_or(FaultError::NoRange { run })?;
        while next < end {
            let has = |range: &&FaultRange| range.slot == run.slot && range.pages().contains(&next);
            let range = self.ranges.iter().find(has).ok_or(FaultError::NoRange { run })?;
            let part = next..end.min(range.pages().end);
            next = part.end;
            act(range, part)?;
        }
        Ok(())
    }
}

/// Divides a slot into at most `shares` runs of pages.
fn divide(slot: &Slot, page_bytes: u64, shares: usize) -> impl Iterator<Item = Range<u64>> {
    let align = ALIGN_PAGES.max(page_bytes / PAGE);
    let pages = slot.pages();
    let each = pages.div_ceil(shares.max(1) as u64).next_multiple_of(align);
    (0..pages).step_by(each as usize).map(move |first| first..(first + each).min(pages))
}
