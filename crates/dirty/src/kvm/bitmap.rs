//! KVM's bitmap, cleared and protected by the call that reads it.

use std::sync::Arc;

use kvm_ioctls::VmFd;
use vmferry_memory::PageSet;

use super::ioctl;
use super::slot::KvmSlot;
use super::slots::Slots;
use crate::{DirtyLog, DirtyLogError};

/// `KVM_GET_DIRTY_LOG`, which every KVM supports.
pub struct KvmBitmapLog {
    slots: Slots,
}

impl KvmBitmapLog {
    pub(super) const NAME: &str = "kvm-bitmap";

    /// A log of these slots, which must cover everything that the guest writes.
    #[must_use]
    pub fn new(vm: Arc<VmFd>, slots: Vec<KvmSlot>) -> Self {
        Self { slots: Slots::new(Self::NAME, vm, slots) }
    }
}

impl DirtyLog for KvmBitmapLog {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn start(&self) -> Result<(), DirtyLogError> {
        self.slots.need_bitmap()?;
        // An earlier log of this machine may have left manual clear on; a read would then protect
        // nothing.
        if ioctl::has_manual_clear(self.slots.vm()) {
            ioctl::set_manual_clear(self.slots.vm(), false).map_err(|error| {
                DirtyLogError::Unavailable { log: Self::NAME, reason: error.to_string() }
            })?;
        }
        self.slots.set_logging(true)
    }

    fn collect(&self, into: &mut PageSet) -> Result<(), DirtyLogError> {
        self.slots.collect(into).map(drop)
    }

    fn stop(&self) -> Result<(), DirtyLogError> {
        self.slots.set_logging(false)
    }
}
