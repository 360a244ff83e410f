//! A device on guest-physical addresses beside memory, and its wires: an interrupt, and kicks that KVM takes
//! without an exit to user space.

use std::sync::Arc;

use kvm_ioctls::{IoEventAddress, VmFd};
use vmm_sys_util::eventfd::EventFd;

use super::KvmError;

/// A device that vCPUs read and write. Called by their threads; offsets are from the device's first address.
pub trait MmioDevice: Send + Sync {
    /// The guest reads `data.len()` bytes, all of which are to be filled.
    fn read(&self, offset: u64, data: &mut [u8]);

    /// The guest writes.
    fn write(&self, offset: u64, data: &[u8]);
}

/// Where a device is, and how it is connected.
pub struct MmioWiring {
    /// Its first guest-physical address.
    pub address: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// What is there.
    pub device: Arc<dyn MmioDevice>,
    /// Writing to it raises the interrupt, as an edge.
    pub interrupt: EventFd,
    /// The interrupt's number: the pin of the IOAPIC.
    pub gsi: u32,
    /// Where the guest writes the number of one of `kicks`, as 32 bits.
    pub kick_offset: u64,
    /// What hears it, by that number. Such writes do not reach the device.
    pub kicks: Vec<EventFd>,
}

impl MmioWiring {
    /// Connects interrupt and kicks to the machine.
    pub(super) fn connect(&self, vm: &VmFd) -> Result<(), KvmError> {
        vm.register_irqfd(&self.interrupt, self.gsi).map_err(KvmError::vm("KVM_IRQFD"))?;
        let address = IoEventAddress::Mmio(self.address + self.kick_offset);
        for (number, kick) in (0_u32..).zip(&self.kicks) {
            vm.register_ioevent(kick, &address, number).map_err(KvmError::vm("KVM_IOEVENTFD"))?;
        }
        Ok(())
    }
}
