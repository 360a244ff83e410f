//! userfaultfd's asynchronous write protection, on memory of this process or of another one.
//!
//! The kernel permits a write to a protected page and removes the protection. `PAGEMAP_SCAN` finds
//! the pages that lost it and protects them again in the same walk of the page table. It detects
//! all writes through the process's mapping: by vCPUs of KVM, the VMM's devices, and system calls.
//! It does *not* detect I/O that pinned a page earlier (O_DIRECT in flight), nor writes through
//! another mapping or by `pwrite`.
//!
//! # Pages given back
//!
//! A page that is given back to the system (punched out of its file, `MADV_DONTNEED` on private
//! memory, a mapping shrunk by `mremap` and grown again) reads as zeros without having been
//! written. The log does not promise to report it, because the protection is removed with the page.
//! The caller that gives pages back must notify the engine, which then looks for them itself.
//!
//! # Regions
//!
//! The addresses of a slot's pages can change while it logs: see [`UffdLog::add_region`] and
//! [`UffdLog::remove_region`]. Changes by the process without notice are detected: memory that is
//! no longer mapped, or that was mapped again, is an error of the next
//! [`collect`](DirtyLog::collect). See `mappings`.

mod errors;
mod ioctl;
mod mappings;
mod region;

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;

use parking_lot::Mutex;
use vmferry_memory::pagemap::PageRegion;
use vmferry_memory::{GuestMemory, PageSet, SlotId};

use crate::{DirtyLog, DirtyLogError};
use errors::{failed, mapping_error, unavailable};
use mappings::{Lost, Mappings};
use region::{Region, Tools};

const NAME: &str = "userfaultfd";

/// Regions per system call: 24 KiB, so that a round with scattered writes needs few calls.
const REGIONS: usize = 1024;

/// The log of a guest's whole memory. When it is dropped, nothing stays registered.
pub struct UffdLog {
    mappings: Mappings,
    /// This process's mapping of the same memory. It stays mapped as long as the log exists.
    memory: GuestMemory,
    state: Mutex<State>,
}

struct State {
    userfaultfd: Userfaultfd,
    logging: bool,
    /// Where the slots are mapped in the writing process; they do not overlap.
    regions: Vec<Region>,
    /// Pages that the next collect reports in any case.
    pending: Option<PageSet>,
    /// Buffer that the kernel fills during a scan.
    buffer: Vec<PageRegion>,
}

enum Userfaultfd {
    /// A userfaultfd of this process: created at each start, and closed at each stop.
    Own(Option<OwnedFd>),
    /// A userfaultfd of another process, kept because it is harder to get a new one.
    Other(OwnedFd),
}

impl UffdLog {
    /// A log of this memory, which must be mapped in this process.
    ///
    /// # Errors
    /// [`DirtyLogError::Unavailable`] on kernels before 6.7, or if userfaultfd is not permitted.
    pub fn new(memory: &GuestMemory) -> Result<Self, DirtyLogError> {
        // Tried now, so that the user gets the error before a guest is started.
        ioctl::open().map_err(unavailable)?;
        let mappings = Mappings::of(std::process::id()).map_err(unavailable)?;
        let ranges = memory.slots().iter().map(|slot| {
            let start = slot.host_address() as u64;
            (slot.id(), start..start + slot.len_bytes() as u64)
        });
        Self::over(ranges.collect(), mappings, memory.clone(), Userfaultfd::Own(None))
    }

    /// A log of the writes of process `pid` to its mappings `ranges`, one for each slot, starting
    /// at the slot's first page. `userfaultfd` was created by that process and is not set up yet.
    /// `memory` is this process's mapping of the same memory.
    ///
    /// # Errors
    /// [`DirtyLogError::Unavailable`] on kernels before 6.7, or if `/proc/PID/pagemap` may not be
    /// opened; [`DirtyLogError::Mapping`] for a range that does not fit its slot.
    pub fn of_process(
        pid: u32,
        userfaultfd: OwnedFd,
        ranges: Vec<(SlotId, Range<u64>)>,
        memory: GuestMemory,
    ) -> Result<Self, DirtyLogError> {
        ioctl::enable(&userfaultfd).map_err(unavailable)?;
        let mappings = Mappings::of(pid).map_err(unavailable)?;
        Self::over(ranges, mappings, memory, Userfaultfd::Other(userfaultfd))
    }

    fn over(
        ranges: Vec<(SlotId, Range<u64>)>,
        mappings: Mappings,
        memory: GuestMemory,
        userfaultfd: Userfaultfd,
    ) -> Result<Self, DirtyLogError> {
        let buffer = vec![PageRegion::default(); REGIONS];
        let state =
            State { userfaultfd, logging: false, regions: Vec::new(), pending: None, buffer };
        let log = Self { mappings, memory, state: Mutex::new(state) };
        for (slot, range) in ranges {
            log.add_region(slot, 0, range)?;
        }
        Ok(log)
    }

    /// Starts logging a part of a slot that the process has just mapped at addresses `range`,
    /// starting at page `first_page` of the slot. Earlier writes there are unknown, so the next
    /// collect reports all of its populated pages. The slot keeps the length it had when the log
    /// was created: memory that may be plugged in later is a part of it that is not mapped yet.
    ///
    /// # Errors
    /// [`DirtyLogError::Mapping`] if the range does not fit the slot, overlaps another region, or
    /// is not mapped; otherwise the kernel's refusal. In that case the range is not logged.
    pub fn add_region(
        &self,
        slot: SlotId,
        first_page: u64,
        range: Range<u64>,
    ) -> Result<(), DirtyLogError> {
        let bad = |why| mapping_error(slot, &range, why);
        let of = self.memory.slot(slot);
        let of = of.map_err(|_| DirtyLogError::NoSuchSlot { log: NAME, slot })?;
        let mut region = Region::new(of, first_page, range.clone()).map_err(bad)?;
        let mut state = self.state.lock();
        for other in &state.regions {
            if overlap(&other.range, &region.range)
                || other.slot == slot && overlap(&other.pages(), &region.pages())
            {
                return Err(bad("another region of the log has a part of it: remove that".into()));
            }
        }
        if state.logging {
            self.arm(&mut state, &mut region)?;
            // After arming: later writes are in the log.
            if let Err(error) = self.pend_populated(&mut state, &region) {
                // The caller must get the first error.
                let _ = state.with(&self.mappings, |tools| region.disarm(tools.userfaultfd));
                return Err(error);
            }
        }
        state.regions.push(region);
        Ok(())
    }

    /// Stops logging a range of addresses, which may be a part of a region, or several. Call it
    /// before the process unmaps or remaps the range, so that the writes there are in the next
    /// collect. If it is called later, that collect reports everything that is populated there in
    /// the slot's file. Addresses that are not logged are ignored.
    ///
    /// # Errors
    /// [`DirtyLogError::Mapping`] if the range cuts a huge page; otherwise the kernel's refusal.
    pub fn remove_region(&self, range: Range<u64>) -> Result<(), DirtyLogError> {
        let mut state = self.state.lock();
        let (cut, kept) = std::mem::take(&mut state.regions)
            .into_iter()
            .partition::<Vec<_>, _>(|region| overlap(&region.range, &range));
        state.regions = kept;
        let mut result = Ok(());
        for region in cut {
            let aligned = |at: u64| {
                at.clamp(region.range.start, region.range.end).is_multiple_of(region.page_bytes)
            };
            if !aligned(range.start) || !aligned(range.end) {
                let why = format!("that is no range of whole pages of {} bytes", region.page_bytes);
                result = Err(mapping_error(region.slot, &range, why));
                state.regions.push(region);
                continue;
            }
            for rest in [region.range.start..range.start, range.end..region.range.end] {
                if rest.start < rest.end {
                    state.regions.push(region.part(rest));
                }
            }
            if state.logging {
                result = result.and(self.part_with(&mut state, region.part(range.clone())));
            }
        }
        result
    }

    fn arm(&self, state: &mut State, region: &mut Region) -> Result<(), DirtyLogError> {
        let armed = state.with(&self.mappings, |tools| region.arm(tools));
        let checked = armed.and_then(|()| self.check_mapped(&mut state.buffer, region));
        checked.map_err(|error| {
            // A part of it may already be registered.
            let _ = state.with(&self.mappings, |tools| region.disarm(tools.userfaultfd));
            self.explain("protect", region, &mut state.buffer, error)
        })
    }

    /// Keeps the pages written to a region for the next collect, and unregisters the region.
    fn part_with(&self, state: &mut State, mut region: Region) -> Result<(), DirtyLogError> {
        let mut pending = state.pending.take().unwrap_or_else(|| self.empty());
        let pages = pending.bitmap_mut(region.slot);
        let harvested = state
            .with(&self.mappings, |tools| region.harvest(tools, pages))
            .and_then(|()| self.check_mapped(&mut state.buffer, &region));
        state.pending = Some(pending);
        if harvested.is_err() && region.is_file() {
            self.pend_populated(state, &region)?;
        }
        self.disarm(state, &region)
    }

    /// Makes the next collect report the populated pages of a region.
    fn pend_populated(&self, state: &mut State, region: &Region) -> Result<(), DirtyLogError> {
        let populated = self.memory.populated();
        let populated =
            populated.map_err(|source| DirtyLogError::Populated { log: NAME, source })?;
        let pending = state.pending.get_or_insert_with(|| self.empty()).bitmap_mut(region.slot);
        let pages = region.pages();
        for (first, count) in populated.bitmap(region.slot).runs() {
            let (start, end) = (first.max(pages.start), (first + count).min(pages.end));
            if start < end {
                pending.set_run(start, end - start);
            }
        }
        Ok(())
    }

    /// Unregisters a region, unless it is already lost.
    fn disarm(&self, state: &mut State, region: &Region) -> Result<(), DirtyLogError> {
        match state.with(&self.mappings, |tools| region.disarm(tools.userfaultfd)) {
            Err(error) if self.lost(region, &mut state.buffer).is_none() => {
                Err(failed("unregister", region.slot, error))
            }
            _ => Ok(()),
        }
    }

    fn empty(&self) -> PageSet {
        PageSet::for_memory(&self.memory)
    }

    /// Returns an error if a part of a region is not mapped, which a scan does not report.
    fn check_mapped(&self, buffer: &mut [PageRegion], region: &Region) -> io::Result<()> {
        if self.mappings.all_mapped(&region.range, buffer)? {
            return Ok(());
        }
        Err(io::Error::from_raw_os_error(libc::ENOMEM))
    }

    fn lost(&self, region: &Region, buffer: &mut [PageRegion]) -> Option<Lost> {
        self.mappings.lost(&region.range, buffer).ok().flatten()
    }

    /// The error for a failed operation, with its cause if the region is lost.
    fn explain(
        &self,
        action: &'static str,
        region: &Region,
        buffer: &mut [PageRegion],
        error: io::Error,
    ) -> DirtyLogError {
        let refused = matches!(
            error.raw_os_error(),
            Some(libc::EPERM | libc::ENOMEM | libc::ENOENT | libc::ESRCH | libc::EINVAL)
        );
        let why = |what| format!("{what}; tell the log of such changes, and migrate again");
        match self.lost(region, buffer).filter(|_| refused) {
            Some(Lost::Process) => DirtyLogError::ProcessGone { log: NAME, pid: self.mappings.pid },
            Some(Lost::Unmapped(hole)) => {
                mapping_error(region.slot, &hole, why("it is not mapped any more"))
            }
            // A region that could not be armed is not registered, for whatever reason.
            Some(Lost::Unregistered(range)) if action == "harvest" => {
                mapping_error(region.slot, &range, why("it was mapped again and is not logged"))
            }
            _ => failed(action, region.slot, error),
        }
    }
}

impl State {
    /// Calls `act` with the tools to inspect the process, if there is a userfaultfd.
    fn with<T>(
        &mut self,
        mappings: &Mappings,
        act: impl FnOnce(&mut Tools) -> io::Result<T>,
    ) -> io::Result<T> {
        let userfaultfd = match &self.userfaultfd {
            Userfaultfd::Own(Some(descriptor)) | Userfaultfd::Other(descriptor) => descriptor,
            Userfaultfd::Own(None) => return Err(io::ErrorKind::NotConnected.into()),
        };
        let regions = &mut self.buffer;
        act(&mut Tools { pagemap: &mappings.pagemap, userfaultfd, regions })
    }
}

impl DirtyLog for UffdLog {
    fn name(&self) -> &'static str {
        NAME
    }

    fn start(&self) -> Result<(), DirtyLogError> {
        let mut state = self.state.lock();
        if let Userfaultfd::Own(descriptor) = &mut state.userfaultfd {
            *descriptor = Some(ioctl::open().map_err(unavailable)?);
        }
        state.pending = None;
        let mut regions = std::mem::take(&mut state.regions);
        let mut armed = Ok(());
        for started in 0..regions.len() {
            // This only protects: all populated pages are sent anyway.
            armed = self.arm(&mut state, &mut regions[started]);
            if armed.is_err() {
                for region in &regions[..started] {
                    // The caller must get the error of the failed start.
                    let _ = self.disarm(&mut state, region);
                }
                break;
            }
        }
        state.regions = regions;
        state.logging = armed.is_ok();
        if let (Err(_), Userfaultfd::Own(descriptor)) = (&armed, &mut state.userfaultfd) {
            *descriptor = None;
        }
        armed
    }

    fn collect(&self, into: &mut PageSet) -> Result<(), DirtyLogError> {
        let mut state = self.state.lock();
        if !state.logging {
            return Err(DirtyLogError::NotStarted { log: NAME });
        }
        if let Some(pending) = state.pending.take() {
            into.union_with(&pending);
        }
        let mut regions = std::mem::take(&mut state.regions);
        let harvested = regions.iter_mut().try_for_each(|region| {
            let pages = into.bitmap_mut(region.slot);
            // The mappings are checked last, so that the result is valid for the scan too.
            state
                .with(&self.mappings, |tools| region.harvest(tools, pages))
                .and_then(|()| self.check_mapped(&mut state.buffer, region))
                .map_err(|error| self.explain("harvest", region, &mut state.buffer, error))
        });
        state.regions = regions;
        harvested
    }

    fn stop(&self) -> Result<(), DirtyLogError> {
        let mut state = self.state.lock();
        if !std::mem::take(&mut state.logging) {
            return Ok(());
        }
        let regions = std::mem::take(&mut state.regions);
        // All regions are unregistered, even if one of them fails.
        let stopped = regions.iter().map(|region| self.disarm(&mut state, region));
        let stopped = stopped.fold(Ok(()), Result::and);
        state.regions = regions;
        state.pending = None;
        if let Userfaultfd::Own(descriptor) = &mut state.userfaultfd {
            *descriptor = None;
        }
        stopped
    }
}

impl Drop for UffdLog {
    fn drop(&mut self) {
        // A failure cannot be reported here.
        let _ = self.stop();
    }
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}
