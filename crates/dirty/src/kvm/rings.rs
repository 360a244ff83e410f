//! The dirty rings of a machine's vCPUs.
//!
//! Facts, from Linux `Documentation/virt/kvm/api.rst`, section 8.29, and `virt/kvm/dirty_ring.c`:
//!
//! - There is one ring for each vCPU. Rings are turned on once, before any vCPU is created. The
//!   length is a power of two, and some entries are reserved for what a processor has buffered.
//! - A page is in the ring once for each time that KVM noticed a write to it: entries repeat.
//!   Entries that a processor with PML has buffered arrive when its vCPU leaves the guest: late,
//!   but never lost. All have arrived once every vCPU has left `KVM_RUN`.
//! - Harvested entries must be reset, which protects their pages again, before the pages are read:
//!   a write in between is then either in the copy or in the ring.
//! - A vCPU whose ring is full leaves the guest (`KVM_EXIT_DIRTY_RING_FULL`) and cannot enter it
//!   again before entries have been reset.
//! - Only one thread at a time may harvest a ring; it may do so while its vCPU runs.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{fmt, io};

use kvm_ioctls::VmFd;
use parking_lot::{Mutex, MutexGuard};
use vmferry_memory::{PageSet, SlotId, SlotLayout};

use super::ioctl;
use super::ring_memory::{DirtyGfn, RingMemory};
use super::slot::KvmSlot;
use super::slots::Slots;
use crate::DirtyLogError;

pub(super) const NAME: &str = "kvm-ring";

/// Entries of a ring by default: 1 MiB for each vCPU, the maximum that KVM allows today. With
/// longer rings a vCPU has to leave the guest less often (here: 100 µs and a reset each time).
pub const DEFAULT_RING_ENTRIES: u32 = 65_536;

/// The shortest ring that works everywhere: KVM reserves 64 entries, and 512 more for PML.
pub const MIN_RING_ENTRIES: u32 = 1024;

/// Maximum number of entries of a ring of this KVM.
///
/// # Errors
/// [`DirtyLogError::Unavailable`] if it has no rings.
pub fn max_ring_entries(vm: &VmFd) -> Result<u32, DirtyLogError> {
    ioctl::ring_limit(vm).map(|(_, entries)| entries).ok_or_else(|| {
        let reason = "this KVM has no dirty ring (Linux 5.11 on x86-64 has); \
                      use the dirty log `clear`, `bitmap` or `uffd`";
        DirtyLogError::Unavailable { log: NAME, reason: reason.into() }
    })
}

/// Turns the dirty rings of a machine on. KVM then keeps no bitmaps for it: [`KvmBitmapLog`] and
/// [`KvmClearLog`] do not work.
///
/// [`KvmBitmapLog`]: crate::KvmBitmapLog
/// [`KvmClearLog`]: crate::KvmClearLog
///
/// # Errors
/// [`DirtyLogError::Unavailable`] if KVM has no rings, does not support that length, or the machine
/// already has rings or vCPUs.
pub fn enable_dirty_ring(vm: &VmFd, entries: u32) -> Result<(), DirtyLogError> {
    check_entries(entries, max_ring_entries(vm)?)?;
    ioctl::enable_ring(vm, entries).map_err(|error| {
        let reason = format!(
            "KVM refused a ring of {entries} entries ({error}): it must be turned on once, before \
             any vCPU is made"
        );
        DirtyLogError::Unavailable { log: NAME, reason }
    })
}

fn check_entries(entries: u32, max: u32) -> Result<(), DirtyLogError> {
    if entries.is_power_of_two() && (MIN_RING_ENTRIES..=max).contains(&entries) {
        return Ok(());
    }
    let reason = format!(
        "a ring cannot have {entries} entries; choose a power of two from {MIN_RING_ENTRIES} \
         to {max}"
    );
    Err(DirtyLogError::Unavailable { log: NAME, reason })
}

/// The rings of all vCPUs of a machine, and the pages harvested from them between two collects.
///
/// The log ([`KvmRingLog`](crate::KvmRingLog)) harvests them, and so does a vCPU's thread when its
/// ring is full ([`reap_full`](Self::reap_full)).
pub struct DirtyRings {
    slots: Slots,
    entries: u32,
    full_exits: AtomicU64,
    state: Mutex<State>,
}

pub(super) struct State {
    rings: Vec<Ring>,
    /// Pages that vCPU threads have harvested since the last collect.
    pending: PageSet,
    has_pending: bool,
    pub(super) logging: bool,
    /// The first harvest that failed; pages may have been lost since then.
    failure: Option<Failure>,
    /// Index of the last entry's slot: the next entry is probably in the same slot.
    last_slot: usize,
}

/// The function that makes KVM reset harvested entries.
type Reset = fn(&VmFd) -> io::Result<()>;

struct Ring {
    memory: RingMemory,
    next: usize,
}

/// Why a harvest failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// An entry for a page that is not logged. It was skipped.
    Entry { vcpu: usize, kvm_slot: u32, page: u64, slot: Option<SlotId> },
    /// KVM refused the reset; the rings stay as full as they are.
    Reset { errno: i32 },
    /// KVM returned before all entries were reset.
    Interrupted,
}

impl DirtyRings {
    /// Rings of `entries` entries, which have been turned on for this machine. `slots` are its
    /// logged slots. The vCPUs' rings are added once the vCPUs exist.
    ///
    /// # Errors
    /// [`DirtyLogError::Unavailable`] if the machine's rings are off, or cannot have that length.
    pub fn new(vm: Arc<VmFd>, entries: u32, slots: Vec<KvmSlot>) -> Result<Self, DirtyLogError> {
        check_entries(entries, max_ring_entries(&vm)?)?;
        if !ioctl::has_ring(&vm) {
            let reason = "the machine was made without dirty rings; \
                          use the dirty log `clear`, `bitmap` or `uffd`";
            return Err(DirtyLogError::Unavailable { log: NAME, reason: reason.into() });
        }
        let pending = PageSet::for_layout(&layout(&slots));
        let state = State {
            rings: Vec::new(),
            pending,
            has_pending: false,
            logging: false,
            failure: None,
            last_slot: 0,
        };
        let (slots, full_exits) = (Slots::new(NAME, vm, slots), AtomicU64::new(0));
        Ok(Self { slots, entries, full_exits, state: Mutex::new(state) })
    }

    /// Maps the ring of the next vCPU, in the order of vCPU numbers. All vCPUs must be added before
    /// a log starts.
    ///
    /// # Errors
    /// [`DirtyLogError::Ring`] if the vCPU has no ring, or one of another length.
    pub fn add_vcpu(&self, vcpu: &impl AsRawFd) -> Result<(), DirtyLogError> {
        let memory = RingMemory::map(vcpu.as_raw_fd(), self.entries)
            .map_err(|source| DirtyLogError::Ring { action: "map a dirty ring", source })?;
        self.state().rings.push(Ring { memory, next: 0 });
        Ok(())
    }

    /// Makes room in the rings. The thread of a vCPU calls this after the vCPU left the guest
    /// because its ring is full. The pages it harvests, or its error, are reported by the log's
    /// next collect. Returns whether there is room. If not, logging is off for good, so that no
    /// more entries are added, and the caller may try again after a while.
    #[must_use]
    pub fn reap_full(&self) -> bool {
        self.full_exits.fetch_add(1, Ordering::Relaxed);
        self.make_room(ioctl::reset_dirty_rings)
    }

    fn make_room(&self, reset: Reset) -> bool {
        let mut state = self.state();
        let State { rings, pending, last_slot, .. } = &mut *state;
        let harvested = harvest_all(&self.slots, rings, last_slot, pending, reset);
        state.has_pending = true;
        let Err(failure) = harvested else { return true };
        state.failure.get_or_insert(failure);
        let has_room = !matches!(failure, Failure::Reset { .. });
        if !has_room && std::mem::take(&mut state.logging) {
            // The log fails anyway; a second failure changes nothing.
            let _ = self.slots.set_logging(false);
        }
        has_room
    }

    /// How often a vCPU's thread has made room.
    #[must_use]
    pub fn full_exits(&self) -> u64 {
        self.full_exits.load(Ordering::Relaxed)
    }

    pub(super) fn slots(&self) -> &Slots {
        &self.slots
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl State {
    pub(super) fn has_rings(&self) -> bool {
        !self.rings.is_empty()
    }

    /// Returns an error if there is nothing to collect and no failure to report.
    pub(super) fn check_started(&self) -> Result<(), DirtyLogError> {
        if self.logging || self.failure.is_some() {
            return Ok(());
        }
        Err(DirtyLogError::NotStarted { log: NAME })
    }

    /// Empties the rings, and forgets pending pages and failures.
    pub(super) fn drain(&mut self, slots: &Slots) -> Result<(), DirtyLogError> {
        let State { rings, pending, last_slot, .. } = self;
        let drained = harvest_all(slots, rings, last_slot, pending, ioctl::reset_dirty_rings);
        self.pending.clear_all();
        (self.has_pending, self.failure) = (false, None);
        match drained {
            // The entries left in the rings, and their protection, no longer matter.
            Ok(()) | Err(Failure::Entry { .. } | Failure::Interrupted) => Ok(()),
            Err(failure @ Failure::Reset { .. }) => Err(failure.error()),
        }
    }

    /// Harvests the rings, and adds the pages that vCPU threads have harvested.
    pub(super) fn collect(
        &mut self,
        slots: &Slots,
        into: &mut PageSet,
    ) -> Result<(), DirtyLogError> {
        if self.failure.is_none() {
            let State { rings, last_slot, .. } = self;
            let harvested = harvest_all(slots, rings, last_slot, into, ioctl::reset_dirty_rings);
            self.failure = harvested.err();
        }
        if let Some(failure) = self.failure {
            return Err(failure.error());
        }
        if std::mem::take(&mut self.has_pending) {
            into.union_with(&self.pending);
            self.pending.clear_all();
        }
        Ok(())
    }
}

/// Harvests all rings into `into` and makes KVM protect the pages again. After an error some
/// entries may be harvested but not reset; the next harvest resets them.
fn harvest_all(
    slots: &Slots,
    rings: &mut [Ring],
    last_slot: &mut usize,
    into: &mut PageSet,
    reset: Reset,
) -> Result<(), Failure> {
    let mut bad = None;
    let mut unreset = false;
    for (vcpu, ring) in rings.iter_mut().enumerate() {
        let found = |kvm_slot, page| {
            if let Err(slot) = add(slots.all(), last_slot, into, kvm_slot, page) {
                bad.get_or_insert(Failure::Entry { vcpu, kvm_slot, page, slot });
            }
        };
        harvest(ring.memory.entries(), &mut ring.next, found);
        unreset |= ring.is_unreset();
    }
    if unreset {
        // Skipped if nothing was harvested: a clean harvest reads one entry per ring.
        reset(slots.vm())
            .map_err(|error| Failure::Reset { errno: error.raw_os_error().unwrap_or_default() })?;
        // KVM resets in order, so the last entry shows whether all are reset. KVM returns early
        // without an error if a signal is pending (see `reset_dirty_rings`).
        if rings.iter().any(Ring::is_unreset) {
            return Err(Failure::Interrupted);
        }
    }
    bad.map_or(Ok(()), Err)
}

impl Ring {
    /// Whether the last harvested entry is not reset yet.
    fn is_unreset(&self) -> bool {
        let entries = self.memory.entries();
        let last = self.next.checked_sub(1).unwrap_or(entries.len() - 1);
        entries[last].is_harvested()
    }
}

/// Harvests a ring from entry `next` on. It terminates: at most the whole ring is dirty, and a
/// harvested entry does not become dirty again before it is reset.
fn harvest(entries: &[DirtyGfn], next: &mut usize, mut found: impl FnMut(u32, u64)) {
    while let Some((kvm_slot, page)) = entries[*next].harvest() {
        found(kvm_slot, page);
        *next = if *next + 1 == entries.len() { 0 } else { *next + 1 };
    }
}

/// Adds a page. If it is not logged, returns the slot that it is beyond, if there is one.
fn add(
    slots: &[KvmSlot],
    last_slot: &mut usize,
    into: &mut PageSet,
    kvm_slot: u32,
    page: u64,
) -> Result<(), Option<SlotId>> {
    let is_it = |slot: &KvmSlot| slot.kvm_slot == kvm_slot;
    if !slots.get(*last_slot).is_some_and(is_it) {
        *last_slot = slots.iter().position(is_it).ok_or(None)?;
    }
    let slot = &slots[*last_slot];
    if page >= slot.pages() {
        return Err(Some(slot.slot));
    }
    into.bitmap_mut(slot.slot).set(page);
    Ok(())
}

impl Failure {
    pub(super) fn error(self) -> DirtyLogError {
        let action = "have KVM protect the pages again";
        match self {
            Self::Entry { vcpu, kvm_slot, page, slot } => {
                let problem = slot.map_or_else(
                    || "which the log does not have".to_owned(),
                    |slot| format!("which is beyond the end of {slot}"),
                );
                DirtyLogError::RingEntry { vcpu, kvm_slot, page, problem }
            }
            Self::Reset { errno } => {
                DirtyLogError::Ring { action, source: io::Error::from_raw_os_error(errno) }
            }
            Self::Interrupted => {
                DirtyLogError::Ring { action, source: io::ErrorKind::Interrupted.into() }
            }
        }
    }
}

/// A layout for a set of pages of these slots, whose numbers may have gaps.
fn layout(slots: &[KvmSlot]) -> Vec<SlotLayout> {
    let end = slots.iter().map(|slot| slot.slot.0 + 1).max().unwrap_or(0);
    let pages = |id| slots.iter().find(|slot| slot.slot == id).map_or(0, KvmSlot::pages);
    (0..end).map(SlotId).map(|slot| SlotLayout { slot, gpa: 0, pages: pages(slot) }).collect()
}

impl fmt::Debug for DirtyRings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirtyRings").field("entries", &self.entries).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
