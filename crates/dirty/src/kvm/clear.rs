//! KVM's bitmap with manual clear.

use std::sync::Arc;

use kvm_ioctls::VmFd;
use vmferry_memory::{PageSet, SlotId};

use super::ioctl;
use super::slot::KvmSlot;
use super::slots::Slots;
use crate::{DirtyLog, DirtyLogError};

/// `KVM_GET_DIRTY_LOG` without side effects, and `KVM_CLEAR_DIRTY_LOG` just before pages are read
/// (`KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`, Linux 5.1).
///
/// A page that is collected and never re-armed stays dirty in KVM and is collected again: late, but
/// never lost. Re-arming clears the bit first, so a later write is logged again, and an earlier
/// write is in the copy.
pub struct KvmClearLog {
    slots: Slots,
}

impl KvmClearLog {
    pub(super) const NAME: &str = "kvm-clear";

    /// A log of these slots, which must cover everything that the guest writes.
    ///
    /// # Errors
    /// [`DirtyLogError::Unavailable`] if KVM lacks manual clear, or the machine has dirty rings.
    pub fn new(vm: Arc<VmFd>, slots: Vec<KvmSlot>) -> Result<Self, DirtyLogError> {
        if !ioctl::has_manual_clear(&vm) {
            let reason = "this KVM has no manual clear; use the dirty log `bitmap`".into();
            return Err(DirtyLogError::Unavailable { log: Self::NAME, reason });
        }
        let slots = Slots::new(Self::NAME, vm, slots);
        slots.need_bitmap()?;
        Ok(Self { slots })
    }

    pub(super) fn slots(&self) -> &Slots {
        &self.slots
    }
}

impl DirtyLog for KvmClearLog {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn start(&self) -> Result<(), DirtyLogError> {
        ioctl::set_manual_clear(self.slots.vm(), true).map_err(|error| {
            DirtyLogError::Unavailable { log: Self::NAME, reason: error.to_string() }
        })?;
        self.slots.set_logging(true)
    }

    fn collect(&self, into: &mut PageSet) -> Result<(), DirtyLogError> {
        self.slots.collect(into).map(drop)
    }

    fn rearm(&self, slot: SlotId, first_word: usize, words: &[u64]) -> Result<(), DirtyLogError> {
        let kvm_slot = self.slots.find(slot)?;
        let all = kvm_slot.pages().div_ceil(64) as usize;
        match first_word.checked_add(words.len()) {
            Some(end) if end <= all => {}
            _ => return Err(DirtyLogError::OutOfSlot { slot, first_word }),
        }
        ioctl::clear_dirty_log(self.slots.vm(), kvm_slot, first_word, words)
            .map_err(self.slots.failed("re-arm pages of", slot))
    }

    fn stop(&self) -> Result<(), DirtyLogError> {
        self.slots.set_logging(false)
    }
}
