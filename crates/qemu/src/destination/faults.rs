//! The missing pages of an attached guest: QEMU's threads wait at them.

use std::sync::Arc;

use serde_json::json;
use vmferry_faults::{FaultDescriptor, FaultError, FaultRanges};
use vmferry_memory::PAGE_SIZE;

use crate::error::QemuError;
use crate::fault_access::FaultAccess;
use crate::qmp::Qmp;
use crate::ram::Ranges;
use crate::writers;

/// The name of the device's descriptor in QEMU, while the userfaultfd is created.
const DESCRIPTOR: &str = "vmferry-faults";

/// A userfaultfd of QEMU's. QEMU keeps a duplicate, so that missing pages stay missing, and never
/// read as zeros, if this is dropped while some are. [`close`](Self::close) closes the duplicate.
pub(super) struct Faults {
    descriptor: FaultDescriptor,
    access: Arc<dyn FaultAccess>,
}

impl Faults {
    /// Has a QEMU create it.
    ///
    /// # Errors
    /// If its guest can't be moved with post-copy, or it can't handle the faults of KVM.
    pub(super) fn create(
        qmp: &mut Qmp,
        pid: u32,
        access: &Arc<dyn FaultAccess>,
    ) -> Result<Self, QemuError> {
        // All accesses to missing pages must be QEMU's own.
        if writers::all_seen(qmp)?.gives_pages_back {
            return Err(QemuError::FreesPages);
        }
        // Without the device, QEMU's own rights decide.
        let device = access.device();
        if let Ok(device) = &device {
            qmp.give_descriptor(DESCRIPTOR, device)?;
        }
        let created = access.create(pid).map_err(|error| match &device {
            Ok(_) => error,
            Err(device) => {
                let (why, device) = (vmferry::chain(&error), vmferry::chain(device));
                QemuError::NoFaults { why, device }
            }
        });
        // QEMU closes it at the end otherwise, which harms nothing.
        if device.is_ok() {
            let _ = qmp.execute("closefd", json!({ "fdname": DESCRIPTOR }));
        }
        let access = Arc::clone(access);
        let failed = |error: FaultError| QemuError::Inject { pid, why: vmferry::chain(&error) };
        let descriptor = FaultDescriptor::set_up(created?, PAGE_SIZE as u64);
        let descriptor = descriptor.map_err(failed).inspect_err(|_| access.close())?;
        Ok(Self { descriptor, access })
    }

    /// Nothing is missing, or the guest is discarded.
    pub(super) fn close(self) {
        self.access.close();
    }

    /// Registers blocks of QEMU's memory.
    pub(super) fn register(&self, blocks: &Ranges) -> Result<FaultRanges, FaultError> {
        // SAFETY: the addresses are QEMU's. In this process the files of these blocks are mapped as
        // guest memory, to which Rust holds no reference.
        unsafe { FaultRanges::register_blocks(blocks, &self.descriptor) }
    }
}
