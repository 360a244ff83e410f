//! A memory slot of a KVM machine.

use vmferry_memory::{PAGE_SIZE, SlotId};

/// A memory slot of KVM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvmSlot {
    /// Its number in vmferry.
    pub slot: SlotId,
    /// Its number in KVM.
    pub kvm_slot: u32,
    /// Guest-physical address in bytes.
    pub gpa: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Host-virtual address.
    pub host_address: u64,
}

impl KvmSlot {
    pub(super) fn pages(&self) -> u64 {
        self.bytes / PAGE_SIZE as u64
    }
}
