//! A device on guest-physical addresses beside memory, and its wires: an interrupt, and kicks that KVM takes
//! without an exit to user space.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

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

/// An interrupt, as an edge on a pin of the IOAPIC, by an ioctl (`KVM_IRQ_LINE`).
///
/// An irqfd would do without the ioctl, but its edge goes to the IOAPIC by a worker of the kernel's, which comes late on
/// a busy host.
pub struct InterruptPin {
    gsi: u32,
    vm: OnceLock<Weak<VmFd>>,
    pulses: AtomicU64,
}

impl InterruptPin {
    /// The pin with this number, of no machine yet.
    #[must_use]
    pub fn new(gsi: u32) -> Self {
        Self { gsi, vm: OnceLock::new(), pulses: AtomicU64::new(0) }
    }

    /// Raises the interrupt; without a machine nothing happens.
    pub fn pulse(&self) {
        self.pulses.fetch_add(1, Ordering::SeqCst);
        if let Some(vm) = self.vm.get().and_then(Weak::upgrade) {
            for active in [true, false] {
                // Refused only by a machine that is being torn down.
                let _ = vm.set_irq_line(self.gsi, active);
            }
        }
    }

    /// How often it was raised.
    #[must_use]
    pub fn pulses(&self) -> u64 {
        self.pulses.load(Ordering::SeqCst)
    }
}

/// Where a device is, and how it is connected.
pub struct MmioWiring {
    /// Its first guest-physical address.
    pub address: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// What is there.
    pub device: Arc<dyn MmioDevice>,
    /// The interrupt.
    pub interrupt: Arc<InterruptPin>,
    /// Where the guest writes the number of one of `kicks`, as 32 bits.
    pub kick_offset: u64,
    /// What hears it, by that number. Such writes do not reach the device.
    pub kicks: Vec<EventFd>,
}

impl MmioWiring {
    /// Connects interrupt and kicks to the machine.
    pub(super) fn connect(&self, vm: &Arc<VmFd>) -> Result<(), KvmError> {
        self.interrupt.vm.get_or_init(|| Arc::downgrade(vm));
        let address = IoEventAddress::Mmio(self.address + self.kick_offset);
        for (number, kick) in (0_u32..).zip(&self.kicks) {
            vm.register_ioevent(kick, &address, number).map_err(KvmError::vm("KVM_IOEVENTFD"))?;
        }
        Ok(())
    }
}
