//! The parts of a machine: KVM itself, memory slots, in-kernel devices, CPUID.

use std::fs::OpenOptions;

use kvm_bindings::{
    CpuId, KVM_CAP_EXCEPTION_PAYLOAD, KVM_PIT_SPEAKER_DUMMY, kvm_enable_cap, kvm_pit_config,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Cap, Kvm, VmFd};
use vm_memory::bitmap::Bitmap;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::devices::SERIAL_GSI;
use super::{KvmError, MemorySlot};

/// Task state segments for Intel's real-mode emulation: three pages below the BIOS, outside RAM.
const TSS_ADDRESS: usize = 0xfffb_d000;
/// One more page for the same purpose.
const IDENTITY_MAP_ADDRESS: u64 = 0xfffb_c000;
/// The version of the KVM interface since 2007.
const KVM_API_VERSION: i32 = 12;

/// The capabilities that a machine needs. Every KVM for x86 has them since Linux 4.13.
const NEEDED: &[(Cap, &str)] = &[
    (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
    (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
    (Cap::Pit2, "KVM_CAP_PIT2"),
    (Cap::PitState2, "KVM_CAP_PIT_STATE2"),
    (Cap::Irqfd, "KVM_CAP_IRQFD"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
    (Cap::MpState, "KVM_CAP_MP_STATE"),
    (Cap::VcpuEvents, "KVM_CAP_VCPU_EVENTS"),
    (Cap::Debugregs, "KVM_CAP_DEBUGREGS"),
    (Cap::Xsave, "KVM_CAP_XSAVE"),
    (Cap::Xcrs, "KVM_CAP_XCRS"),
    (Cap::AdjustClock, "KVM_CAP_ADJUST_CLOCK"),
    (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
];

/// Opens KVM, and checks that it has all capabilities that a machine needs.
pub(super) fn open() -> Result<Kvm, KvmError> {
    let unavailable = |reason: String| KvmError::Unavailable { reason };
    // Opened here first, because this error is more precise than that of kvm-ioctls.
    OpenOptions::new().read(true).write(true).open("/dev/kvm").map_err(|error| {
        unavailable(match error.kind() {
            std::io::ErrorKind::NotFound => {
                "/dev/kvm does not exist: load the kvm_intel or kvm_amd module, \
                 or enable nested virtualization"
                    .into()
            }
            std::io::ErrorKind::PermissionDenied => {
                "/dev/kvm may not be opened: add this user to the group `kvm`".into()
            }
            _ => format!("/dev/kvm cannot be opened: {error}"),
        })
    })?;
    let kvm =
        Kvm::new().map_err(|error| unavailable(format!("/dev/kvm cannot be opened: {error}")))?;
    let version = kvm.get_api_version();
    if version != KVM_API_VERSION {
        return Err(unavailable(format!(
            "KVM has interface version {version}, and version {KVM_API_VERSION} is needed"
        )));
    }
    match NEEDED.iter().find(|(capability, _)| !kvm.check_extension(*capability)) {
        Some((_, name)) => Err(unavailable(format!("this KVM has no {name}"))),
        None => Ok(kvm),
    }
}

/// Makes the saved state distinguish a pending exception from one that is being delivered, and
/// include the fault's address. By default KVM reports both as being delivered.
pub(super) fn keep_exceptions_apart(vm: &VmFd) -> Result<(), KvmError> {
    if vm.check_extension_raw(KVM_CAP_EXCEPTION_PAYLOAD.into()) <= 0 {
        return Ok(());
    }
    let mut capability = kvm_enable_cap { cap: KVM_CAP_EXCEPTION_PAYLOAD, ..Default::default() };
    capability.args[0] = 1;
    vm.enable_cap(&capability).map_err(KvmError::vm("KVM_CAP_EXCEPTION_PAYLOAD"))
}

/// Adds a slot for every region of `memory`. The caller keeps `memory` alive as long as a vCPU may
/// run.
pub(super) fn add_memory<B: Bitmap>(
    vm: &VmFd,
    memory: &GuestMemoryMmap<B>,
) -> Result<Vec<MemorySlot>, KvmError> {
    let mut slots = Vec::new();
    for (slot, region) in (0..).zip(memory.iter()) {
        let base = region.start_addr().raw_value();
        let host_address = memory.get_host_address(region.start_addr());
        let host_address = host_address
            .map_err(|error| KvmError::Config { reason: format!("memory: {error}") })?;
        let slot =
            MemorySlot { slot, gpa: base, bytes: region.len(), host_address: host_address as u64 };
        let region = kvm_userspace_memory_region {
            slot: slot.slot,
            flags: 0,
            guest_phys_addr: slot.gpa,
            memory_size: slot.bytes,
            userspace_addr: slot.host_address,
        };
        // SAFETY: The range is one mapping of `memory`, which outlives every vCPU, because each
        // vCPU thread holds a reference to it.
        unsafe { vm.set_user_memory_region(region) }
            .map_err(KvmError::vm("KVM_SET_USER_MEMORY_REGION"))?;
        slots.push(slot);
    }
    Ok(slots)
}

/// Creates PIC, IOAPIC, LAPICs and PIT in the kernel, and returns the serial port's irqfd.
pub(super) fn add_interrupt_controllers(vm: &VmFd) -> Result<EventFd, KvmError> {
    vm.set_tss_address(TSS_ADDRESS).map_err(KvmError::vm("KVM_SET_TSS_ADDR"))?;
    vm.set_identity_map_address(IDENTITY_MAP_ADDRESS)
        .map_err(KvmError::vm("KVM_SET_IDENTITY_MAP_ADDR"))?;
    vm.create_irq_chip().map_err(KvmError::vm("KVM_CREATE_IRQCHIP"))?;
    // With the dummy speaker port that guests expect of a PC.
    let pit = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
    vm.create_pit2(pit).map_err(KvmError::vm("KVM_CREATE_PIT2"))?;
    let interrupt =
        EventFd::new(EFD_NONBLOCK).map_err(|source| KvmError::Vm { what: "an eventfd", source })?;
    vm.register_irqfd(&interrupt, SERIAL_GSI).map_err(KvmError::vm("KVM_IRQFD"))?;
    Ok(interrupt)
}

/// The CPUID that KVM supports, with this vCPU's APIC ID filled in.
pub(super) fn vcpu_cpuid(mut cpuid: CpuId, vcpu: u32) -> CpuId {
    for entry in cpuid.as_mut_slice() {
        match entry.function {
            0x1 => entry.ebx = (entry.ebx & 0x00ff_ffff) | vcpu << 24,
            0xb | 0x1f => entry.edx = vcpu,
            _ => {}
        }
    }
    cpuid
}
