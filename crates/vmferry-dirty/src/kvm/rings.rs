//! The dirty rings of a machine's vCPUs.
//!
//! Facts, from Linux `Documentation/virt/kvm/api.rst`, section 8.29, and `virt/kvm/dirty_ring.c`:
//!
//! - There is one ring for each vCPU. It is turned on once, before any vCPU is made; its length is a
//!   power of two, and some of its entries are kept for what a processor has buffered.
//! - A page is in the ring once for each time that KVM noticed a write to it: entries repeat. What
//!   a processor with PML has buffered comes when its vCPU leaves the guest: late, and never lost;
//!   all is there once every vCPU has left `KVM_RUN`.
//! - Harvested entries must be reset, which protects their pages again, before the pages are read:
//!   a write in between is then either in the copy or in the ring.
//! - A vCPU whose ring is full leaves the guest (`KVM_EXIT_DIRTY_RING_FULL`) and is not let in
//!   again before entries have been reset.
//! - Only one thread at a time may harvest a ring; it may do so while its vCPU runs.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fmt, io};

use kvm_ioctls::VmFd;
use vmferry_memory::{PageSet, SlotId, SlotLayout};

use super::ioctl;
use super::ring_memory::{DirtyGfn, RingMemory};
use super::slots::{KvmSlot, Slots};
use crate::DirtyLogError;

pub(super) const NAME: &str = "kvm-ring";

/// Entries of a ring by default: 1 MiB for each vCPU, the most that KVM allows today. The longer,
/// the rarer a vCPU has to leave the guest (here: 100 µs and a reset) to go on.
pub const DEFAULT_RING_ENTRIES: u32 = 65_536;

/// The shortest ring that works everywhere: KVM keeps 64 entries, and 512 more for PML.
pub const MIN_RING_ENTRIES: u32 = 1024;

/// The most entries that a ring of this KVM can have.
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

/// Turns the dirty rings of a machine on. KVM then has no bitmaps for it: [`KvmBitmapLog`] and
/// [`KvmClearLog`] do not work.
///
/// [`KvmBitmapLog`]: crate::KvmBitmapLog
/// [`KvmClearLog`]: crate::KvmClearLog
///
/// # Errors
/// [`DirtyLogError::Unavailable`] if KVM has no rings, or none of that length, or the machine has
/// rings or vCPUs already.
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
        "a ring of {entries} entries was asked for; choose a power of two from {MIN_RING_ENTRIES} \
         to {max}"
    );
    Err(DirtyLogError::Unavailable { log: NAME, reason })
}

/// The rings of all vCPUs of a machine, and what was harvested from them between two collects.
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
    /// What vCPU threads have harvested since the last collect.
    pending: PageSet,
    has_pending: bool,
    pub(super) logging: bool,
    /// The first harvest that failed; pages may have been lost since.
    failure: Option<Failure>,
    /// Where in the slots the last entry was: the next is likely in the same.
    last_slot: usize,
}

/// What has KVM take harvested entries back.
type Reset = fn(&VmFd) -> io::Result<()>;

struct Ring {
    memory: RingMemory,
    next: usize,
}

/// Why a harvest failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// An entry that is not of a page that is logged. It was skipped.
    Entry { vcpu: usize, kvm_slot: u32, page: u64, slot: Option<SlotId> },
    /// KVM refused to reset; the rings stay as full as they are.
    Reset { errno: i32 },
    /// KVM came back before all was reset.
    Interrupted,
}

impl DirtyRings {
    /// Rings of `entries` entries, which have been turned on for this machine, whose logged slots
    /// are `slots`. The vCPUs' rings are added when there are vCPUs.
    ///
    /// # Errors
    /// [`DirtyLogError::Unavailable`] if the machine's rings are off, or can't be of that length.
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

    /// Maps the ring of the next vCPU, in the order of their numbers. All vCPUs must be added
    /// before a log starts.
    ///
    /// # Errors
    /// [`DirtyLogError::Ring`] if it has no ring, or one of another length.
    pub fn add_vcpu(&self, vcpu: &impl AsRawFd) -> Result<(), DirtyLogError> {
        let memory = RingMemory::map(vcpu.as_raw_fd(), self.entries)
            .map_err(|source| DirtyLogError::Ring { action: "map a dirty ring", source })?;
        self.state().rings.push(Ring { memory, next: 0 });
        Ok(())
    }

    /// Makes room in the rings, by the thread of a vCPU that left the guest because its ring is
    /// full. What it harvests comes out of the log's next collect, as does an error. Returns
    /// whether there is room; if not, logging is off for good, so that nothing more goes into the
    /// rings, and the caller may try again after a while.
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
            // The log fails anyway; that this failed too changes nothing.
            let _ = self.slots.set_logging(false);
        }
        has_room
    }

    /// How often a vCPU's thread has had to make room.
    #[must_use]
    pub fn full_exits(&self) -> u64 {
        self.full_exits.load(Ordering::Relaxed)
    }

    pub(super) fn slots(&self) -> &Slots {
        &self.slots
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    pub(super) fn has_rings(&self) -> bool {
        !self.rings.is_empty()
    }

    /// Refuses if there is nothing to collect and no error to tell.
    pub(super) fn check_started(&self) -> Result<(), DirtyLogError> {
        if self.logging || self.failure.is_some() {
            return Ok(());
        }
        Err(DirtyLogError::NotStarted { log: NAME })
    }

    /// Empties the rings and forgets everything.
    pub(super) fn drain(&mut self, slots: &Slots) -> Result<(), DirtyLogError> {
        let State { rings, pending, last_slot, .. } = self;
        let drained = harvest_all(slots, rings, last_slot, pending, ioctl::reset_dirty_rings);
        self.pending.clear_all();
        (self.has_pending, self.failure) = (false, None);
        match drained {
            // What is in the rings, and whether it is protected, is of no interest any more.
            Ok(()) | Err(Failure::Entry { .. } | Failure::Interrupted) => Ok(()),
            Err(failure @ Failure::Reset { .. }) => Err(failure.error()),
        }
    }

    /// Harvests the rings, and hands over what vCPU threads have harvested.
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

/// Harvests all rings into `into` and has KVM protect the pages again. On an error some rings may
/// be harvested and not reset; the next harvest resets them.
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
        // Skipped if there is nothing to do: a clean harvest is a read of one entry per ring.
        reset(slots.vm())
            .map_err(|error| Failure::Reset { errno: error.raw_os_error().unwrap_or_default() })?;
        // KVM resets in order, so the last one says it for all; and it comes back early without an
        // error if there is a signal (see `reset_dirty_rings`).
        if rings.iter().any(Ring::is_unreset) {
            return Err(Failure::Interrupted);
        }
    }
    bad.map_or(Ok(()), Err)
}

impl Ring {
    /// Whether the last entry that was harvested is not reset yet.
    fn is_unreset(&self) -> bool {
        let entries = self.memory.entries();
        let last = self.next.checked_sub(1).unwrap_or(entries.len() - 1);
        entries[last].is_harvested()
    }
}

/// Harvests a ring from entry `next` on. It ends: no more than the whole ring is dirty, and what is
/// harvested does not become dirty again before it is reset.
fn harvest(entries: &[DirtyGfn], next: &mut usize, mut found: impl FnMut(u32, u64)) {
    while let Some((kvm_slot, page)) = entries[*next].harvest() {
        found(kvm_slot, page);
        *next = if *next + 1 == entries.len() { 0 } else { *next + 1 };
    }
}

/// Adds a page, or says which slot it is beyond, if there is one.
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

/// A layout for a set of these slots: their numbers may have gaps.
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
