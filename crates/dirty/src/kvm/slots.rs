//! The memory slots of a KVM machine and their bitmaps, common to KVM's logs.

use std::io;
use std::sync::Arc;

use kvm_ioctls::VmFd;
use parking_lot::Mutex;
use vmferry_memory::{PageSet, SlotId, traverse};

use super::ioctl;
use super::slot::KvmSlot;
use crate::DirtyLogError;

/// The slots of a machine, and a buffer for their bitmaps.
pub(super) struct Slots {
    log: &'static str,
    vm: Arc<VmFd>,
    slots: Vec<KvmSlot>,
    /// Buffer for the longest bitmap, allocated once.
    words: Mutex<Vec<u64>>,
}

impl Slots {
    pub(super) fn new(log: &'static str, vm: Arc<VmFd>, slots: Vec<KvmSlot>) -> Self {
        let words = slots.iter().map(|slot| slot.pages().div_ceil(64)).max().unwrap_or(0);
        Self { log, vm, slots, words: Mutex::new(vec![0; words as usize]) }
    }

    pub(super) fn vm(&self) -> &VmFd {
        &self.vm
    }

    pub(super) fn all(&self) -> &[KvmSlot] {
        &self.slots
    }

    /// Refuses a machine that has dirty rings: KVM keeps no bitmap for it (ENXIO).
    pub(super) fn need_bitmap(&self) -> Result<(), DirtyLogError> {
        if !ioctl::has_ring(&self.vm) {
            return Ok(());
        }
        let reason = "the machine was made with dirty rings, and then KVM keeps no bitmap; \
                      use the dirty log `ring` or `uffd`";
        Err(DirtyLogError::Unavailable { log: self.log, reason: reason.into() })
    }

    pub(super) fn find(&self, slot: SlotId) -> Result<&KvmSlot, DirtyLogError> {
        self.slots
            .iter()
            .find(|candidate| candidate.slot == slot)
            .ok_or(DirtyLogError::NoSuchSlot { log: self.log, slot })
    }

    pub(super) fn failed(
        &self,
        action: &'static str,
        slot: SlotId,
    ) -> impl FnOnce(io::Error) -> DirtyLogError {
        let log = self.log;
        move |source| DirtyLogError::Slot { log, action, slot, source }
    }

    /// Turns KVM's logging of all slots on or off. If that fails, logging that was already turned
    /// on is turned off again.
    pub(super) fn set_logging(&self, on: bool) -> Result<(), DirtyLogError> {
        for (done, slot) in self.slots.iter().enumerate() {
            if let Err(source) = ioctl::set_logging(&self.vm, slot, on) {
                for slot in &self.slots[..done] {
                    // The caller must get the first error.
                    let _ = ioctl::set_logging(&self.vm, slot, false);
                }
                let action = if on { "start logging" } else { "stop logging" };
                return Err(self.failed(action, slot.slot)(source));
            }
        }
        Ok(())
    }

    /// Ors the pages that KVM has logged into `into`, and returns their number.
    pub(super) fn collect(&self, into: &mut PageSet) -> Result<u64, DirtyLogError> {
        let mut dirty = 0;
        let mut words = self.words.lock();
        for slot in &self.slots {
            let words = &mut words[..slot.pages().div_ceil(64) as usize];
            ioctl::dirty_log(&self.vm, slot, words)
                .map_err(self.failed("read the bitmap of", slot.slot))?;
            into.bitmap_mut(slot.slot).or_words(0, words);
            dirty += traverse::count(words);
        }
        Ok(dirty)
    }
}
