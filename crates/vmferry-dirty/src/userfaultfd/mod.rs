//! userfaultfd's asynchronous write protection, on memory of this process or of another one.
//!
//! The kernel lets a write to a protected page through and drops the protection; `PAGEMAP_SCAN`
//! finds the pages that lost it and protects them again in the same walk of the page table. It
//! sees whoever writes through the process's mapping: vCPUs of KVM, the VMM's devices, system
//! calls. It does *not* see pages punched out of a file, nor I/O that pinned a page earlier
//! (O_DIRECT in flight).
//!
//! Pages that were never populated are left alone: without `WP_UNPOPULATED` they cost no page
//! table, and a page that is populated later appears as written.

mod ioctl;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

use vmferry_memory::pagemap::{
    PAGE_IS_PFNZERO, PAGE_IS_PRESENT, PAGE_IS_SWAPPED, PAGE_IS_WRITTEN, PM_SCAN_CHECK_WPASYNC,
    PM_SCAN_WP_MATCHING, PageRegion, Query, scan,
};
use vmferry_memory::{GuestMemory, PAGE_SIZE, PageSet, Slot, SlotId};

use crate::{DirtyLog, DirtyLogError};

const NAME: &str = "userfaultfd";

/// Regions per system call: 24 KiB, so that a round with scattered writes needs few calls.
const REGIONS: usize = 1024;

/// The smallest hole between two runs that is left unprotected: a page table's worth.
const GAP_PAGES: u64 = 512;

/// The log of a guest's whole memory.
pub struct UffdLog {
    /// Where each slot is mapped in the process that writes, as host-virtual addresses there.
    ranges: Vec<(SlotId, Range<u64>)>,
    pagemap: File,
    state: Mutex<State>,
}

struct State {
    userfaultfd: Userfaultfd,
    logging: bool,
    regions: Vec<PageRegion>,
}

enum Userfaultfd {
    /// Of this process: made at each start, and closed at each stop.
    Own(Option<OwnedFd>),
    /// Of another process, which can't be asked for one as easily: kept. The memory is the same files,
    /// mapped here.
    Other(OwnedFd, GuestMemory),
}

impl UffdLog {
    /// A log of this memory, which must be mapped in this process.
    ///
    /// # Errors
    /// [`DirtyLogError::Unavailable`] on kernels before 6.7, or where userfaultfd is forbidden.
    pub fn new(memory: &GuestMemory) -> Result<Self, DirtyLogError> {
        // Found out now, so that a user hears of it before a guest is started.
        ioctl::open().map_err(unavailable)?;
        let pagemap = File::open("/proc/self/pagemap").map_err(unavailable)?;
        let ranges = memory.slots().iter().map(|slot| (slot.id(), range_of(slot))).collect();
        Ok(Self::over(ranges, pagemap, Userfaultfd::Own(None)))
    }

    /// A log of what process `pid` writes to its mappings `ranges`, one for each slot.
    /// `userfaultfd` was made by that process, and nobody has set it up yet. `memory` is what is mapped
    /// there, mapped here too.
    ///
    /// # Errors
    /// [`DirtyLogError::Unavailable`] on kernels before 6.7, or where `/proc/PID/pagemap` may not be
    /// opened.
    pub fn of_process(
        pid: u32,
        userfaultfd: OwnedFd,
        ranges: Vec<(SlotId, Range<u64>)>,
        memory: GuestMemory,
    ) -> Result<Self, DirtyLogError> {
        ioctl::enable(&userfaultfd).map_err(unavailable)?;
        let pagemap = File::open(format!("/proc/{pid}/pagemap")).map_err(unavailable)?;
        Ok(Self::over(ranges, pagemap, Userfaultfd::Other(userfaultfd, memory)))
    }

    fn over(ranges: Vec<(SlotId, Range<u64>)>, pagemap: File, userfaultfd: Userfaultfd) -> Self {
        let regions = vec![PageRegion::default(); REGIONS];
        let state = Mutex::new(State { userfaultfd, logging: false, regions });
        Self { ranges, pagemap, state }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds written pages of a range and protects them again.
    fn harvest(
        &self,
        range: Range<u64>,
        regions: &mut [PageRegion],
        found: impl FnMut(PageRegion),
    ) -> io::Result<()> {
        let query = Query {
            flags: PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC,
            // The page of zeros was only read; a write replaces it by one of its own.
            inverted: PAGE_IS_PFNZERO,
            all: PAGE_IS_WRITTEN | PAGE_IS_PFNZERO,
            any: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            report: 0,
        };
        scan(&self.pagemap, range, query, regions, found)
    }
}

impl DirtyLog for UffdLog {
    fn name(&self) -> &'static str {
        NAME
    }

    fn start(&self) -> Result<(), DirtyLogError> {
        let mut state = self.state();
        let State { userfaultfd, regions, logging } = &mut *state;
        let fresh = match userfaultfd {
            // Closing the descriptor takes everything back if this fails half-way.
            Userfaultfd::Own(_) => Some(ioctl::open().map_err(unavailable)?),
            Userfaultfd::Other(..) => None,
        };
        let descriptor = match (&fresh, &*userfaultfd) {
            (Some(fresh), _)
            | (None, Userfaultfd::Other(fresh, _) | Userfaultfd::Own(Some(fresh))) => fresh,
            (None, Userfaultfd::Own(None)) => return Err(DirtyLogError::NotStarted { log: NAME }),
        };
        let others = match &*userfaultfd {
            Userfaultfd::Other(_, memory) => {
                Some(memory.populated().map_err(|error| unavailable(io::Error::other(error)))?)
            }
            Userfaultfd::Own(_) => None,
        };
        for (slot, range) in &self.ranges {
            ioctl::register(descriptor, range.clone()).map_err(failed("register", *slot))?;
            // This only protects: whatever is populated is sent anyway.
            match &others {
                // A page that is in the file and in no page table of that process, as all are after a
                // migration, would appear as written when it is read there for the first time.
                Some(populated) => {
                    for (first, pages) in joined(populated.bitmap(*slot).runs()) {
                        let start = range.start + first * PAGE_SIZE as u64;
                        let extent = start..start + pages * PAGE_SIZE as u64;
                        ioctl::protect(descriptor, extent).map_err(failed("protect", *slot))?;
                    }
                }
                None => {
                    self.harvest(range.clone(), regions, |_| {})
                        .map_err(failed("protect", *slot))?;
                }
            }
        }
        if fresh.is_some() {
            *userfaultfd = Userfaultfd::Own(fresh);
        }
        *logging = true;
        Ok(())
    }

    fn collect(&self, into: &mut PageSet) -> Result<(), DirtyLogError> {
        let mut state = self.state();
        let State { regions, logging, .. } = &mut *state;
        if !*logging {
            return Err(DirtyLogError::NotStarted { log: NAME });
        }
        for (slot, range) in &self.ranges {
            let start = range.start;
            let pages = into.bitmap_mut(*slot);
            self.harvest(range.clone(), regions, |region| {
                let page = |address: u64| (address - start) / PAGE_SIZE as u64;
                pages.set_run(page(region.start), page(region.end) - page(region.start));
            })
            .map_err(failed("harvest", *slot))?;
        }
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyLogError> {
        let mut state = self.state();
        if !std::mem::take(&mut state.logging) {
            return Ok(());
        }
        let taken;
        let descriptor = match &mut state.userfaultfd {
            Userfaultfd::Own(descriptor) => {
                taken = descriptor.take();
                taken.as_ref()
            }
            Userfaultfd::Other(descriptor, _) => Some(&*descriptor),
        };
        let Some(descriptor) = descriptor else { return Ok(()) };
        for (slot, range) in &self.ranges {
            ioctl::unregister(descriptor, range.clone()).map_err(failed("unregister", *slot))?;
        }
        Ok(())
    }
}

/// Runs of pages, of which neighbours with a small gap are made one: a protected hole costs eight bytes of
/// page table, and each run a system call.
fn joined(runs: impl Iterator<Item = (u64, u64)>) -> Vec<(u64, u64)> {
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (first, pages) in runs {
        match joined.last_mut() {
            Some((start, length)) if first - (*start + *length) <= GAP_PAGES => {
                *length = first + pages - *start;
            }
            _ => joined.push((first, pages)),
        }
    }
    joined
}

fn range_of(slot: &Slot) -> Range<u64> {
    let start = slot.host_address() as u64;
    start..start + slot.len_bytes() as u64
}

fn failed(action: &'static str, slot: SlotId) -> impl FnOnce(io::Error) -> DirtyLogError {
    move |source| DirtyLogError::Slot { log: NAME, action, slot, source }
}

fn unavailable(error: io::Error) -> DirtyLogError {
    let reason = match error.raw_os_error() {
        Some(libc::EINVAL) => {
            "it needs Linux 6.7 with asynchronous write protection; use a KVM log".to_owned()
        }
        Some(libc::EPERM | libc::ENOSYS) => {
            format!("userfaultfd is forbidden here ({error}); use a KVM log")
        }
        _ => error.to_string(),
    };
    DirtyLogError::Unavailable { log: NAME, reason }
}
