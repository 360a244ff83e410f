//! The state of a machine outside its vCPUs: interrupt controllers, timer, clock.

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data, kvm_irqchip,
    kvm_pit_state2,
};
use kvm_ioctls::VmFd;

use super::KvmError;
use crate::state::{SectionKind, StateReader, StateWriter};

const IRQCHIP: SectionKind = SectionKind::mandatory("irqchip", 1);
const PIT: SectionKind = SectionKind::mandatory("pit", 1);
const CLOCK: SectionKind = SectionKind::mandatory("clock", 1);

/// The sections of the machine.
pub(super) const SECTIONS: &[SectionKind] = &[IRQCHIP, PIT, CLOCK];

/// KVM's numbers of the chips, which are the instances of the IRQCHIP sections.
const CHIPS: [u32; 3] = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];

/// The state of a machine without its vCPUs, its memory and its devices in user space.
pub(super) struct VmState {
    chips: [kvm_irqchip; 3],
    pit: kvm_pit_state2,
    clock: kvm_clock_data,
}

impl VmState {
    pub(super) fn save(vm: &VmFd) -> Result<Self, KvmError> {
        let mut chips = CHIPS.map(|chip_id| kvm_irqchip { chip_id, ..Default::default() });
        for chip in &mut chips {
            vm.get_irqchip(chip).map_err(KvmError::vm("KVM_GET_IRQCHIP"))?;
        }
        let pit = vm.get_pit2().map_err(KvmError::vm("KVM_GET_PIT2"))?;
        let clock = vm.get_clock().map_err(KvmError::vm("KVM_GET_CLOCK"))?;
        Ok(Self { chips, pit, clock })
    }

    pub(super) fn load(&self, vm: &VmFd) -> Result<(), KvmError> {
        for chip in &self.chips {
            vm.set_irqchip(chip).map_err(KvmError::vm("KVM_SET_IRQCHIP"))?;
        }
        vm.set_pit2(&self.pit).map_err(KvmError::vm("KVM_SET_PIT2"))?;
        // Only the value, without flags: the guest's clock does not advance while the guest is
        // paused, and does not depend on the wall clocks of the two hosts.
        let clock = kvm_clock_data { clock: self.clock.clock, ..Default::default() };
        vm.set_clock(&clock).map_err(KvmError::vm("KVM_SET_CLOCK"))
    }

    pub(super) fn write(&self, out: &mut StateWriter) -> Result<(), KvmError> {
        for chip in &self.chips {
            out.abi(&IRQCHIP, chip.chip_id, chip)?;
        }
        out.abi(&PIT, 0, &self.pit)?;
        out.abi(&CLOCK, 0, &self.clock)?;
        Ok(())
    }

    pub(super) fn read(from: &StateReader<'_>) -> Result<Self, KvmError> {
        let mut chips = CHIPS.map(|chip_id| kvm_irqchip { chip_id, ..Default::default() });
        for chip in &mut chips {
            let section = from.section(&IRQCHIP, chip.chip_id)?;
            let saved: kvm_irqchip = section.abi()?;
            if saved.chip_id != chip.chip_id {
                return Err(section
                    .invalid(format!("it has the state of chip {}", saved.chip_id))
                    .into());
            }
            *chip = saved;
        }
        Ok(Self {
            chips,
            pit: from.section(&PIT, 0)?.abi()?,
            clock: from.section(&CLOCK, 0)?.abi()?,
        })
    }
}
