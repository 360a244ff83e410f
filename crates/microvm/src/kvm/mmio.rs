//! A device on guest-physical addresses outside memory, and its connections: an interrupt, and
//! kicks that KVM handles without an exit to user space.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use kvm_ioctls::{IoEventAddress, VmFd};
use vmm_sys_util::eventfd::EventFd;

use super::KvmError;

/// A device that vCPUs read and write. The vCPU threads call it, with offsets from the device's
/// first address.
pub trait MmioDevice: Send + Sync {
    /// The guest reads. The device fills all of `data`.
    fn read(&self, offset: u64, data: &mut [u8]);

    /// The guest writes `data`.
    fn write(&self, offset: u64, data: &[u8]);
}

/// An edge-triggered interrupt on a pin of the IOAPIC, raised by an ioctl (`KVM_IRQ_LINE`).
///
/// An irqfd would save the ioctl, but a kernel worker delivers its edge to the IOAPIC, and that
/// worker may run late on a busy host.
pub struct InterruptPin {
    gsi: u32,
    vm: OnceLock<Weak<VmFd>>,
    pulses: AtomicU64,
}

impl InterruptPin {
    /// The pin with this number. It is not connected to a machine yet.
    #[must_use]
    pub fn new(gsi: u32) -> Self {
        Self { gsi, vm: OnceLock::new(), pulses: AtomicU64::new(0) }
    }

    /// Raises the interrupt. Without a machine this does nothing.
    pub fn pulse(&self) {
        self.pulses.fetch_add(1, Ordering::SeqCst);
        if let Some(vm) = self.vm.get().and_then(Weak::upgrade) {
            for active in [true, false] {
                // Fails only while the machine is being destroyed.
                let _ = vm.set_irq_line(self.gsi, active);
            }
        }
    }

    /// How often the interrupt was raised.
    #[must_use]
    pub fn pulses(&self) -> u64 {
        self.pulses.load(Ordering::SeqCst)
    }
}

/// A device, its address, and its connections.
pub struct MmioWiring {
    /// The device's first guest-physical address.
    pub address: u64,
    /// The device's length in bytes.
    pub bytes: u64,
    /// The device.
    pub device: Arc<dyn MmioDevice>,
    /// The device's interrupt.
    pub interrupt: Arc<InterruptPin>,
    /// Offset of the 32-bit register to which the guest writes a queue number to kick the queue.
    pub kick_offset: u64,
    /// The eventfds that KVM signals for these writes, by queue number. The writes do not reach
    /// the device.
    pub kicks: Vec<EventFd>,
}

impl MmioWiring {
    /// Connects the interrupt and the kicks to the machine.
    pub(super) fn connect(&self, vm: &Arc<VmFd>) -> Result<(), KvmError> {
        self.interrupt.vm.get_or_init(|| Arc::downgrade(vm));
        let address = IoEventAddress::Mmio(self.address + self.kick_offset);
        for (number, kick) in (0_u32..).zip(&self.kicks) {
            vm.register_ioevent(kick, &address, number).map_err(KvmError::vm("KVM_IOEVENTFD"))?;
        }
        Ok(())
    }
}
