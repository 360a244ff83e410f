//! The missing pages of an attached guest: QEMU's threads wait at them.

use vmferry_faults::{FaultDescriptor, FaultError, FaultRanges};
use vmferry_memory::PAGE_SIZE;
use vmferry_memory::userfaultfd::FaultOrigin;

use crate::error::QemuError;
use crate::inject::{self, Injected};
use crate::ram::Ranges;

/// A userfaultfd of QEMU's. QEMU keeps a duplicate, so that missing pages stay missing, and never
/// read as zeros, if this process ends.
pub(super) struct Faults {
    descriptor: FaultDescriptor,
    /// Closes QEMU's duplicate at the end.
    _injected: Injected,
}

impl Faults {
    /// Has a QEMU create it.
    pub(super) fn create(pid: u32) -> Result<Self, QemuError> {
        let injected = inject::userfaultfd(pid, FaultOrigin::UserAndKernel)?;
        let failed = |why: String| QemuError::Inject { pid, why };
        let ours = injected.descriptor.try_clone().map_err(|error| failed(error.to_string()))?;
        let descriptor = FaultDescriptor::set_up(ours, PAGE_SIZE as u64);
        let descriptor = descriptor.map_err(|error| failed(vmferry::chain(&error)))?;
        Ok(Self { descriptor, _injected: injected })
    }

    /// Registers blocks of QEMU's memory.
    pub(super) fn register(&self, blocks: &Ranges) -> Result<FaultRanges, FaultError> {
        // SAFETY: the addresses are QEMU's. In this process the files of these blocks are mapped as
        // guest memory, to which Rust holds no reference.
        unsafe { FaultRanges::register_blocks(blocks, &self.descriptor) }
    }
}
