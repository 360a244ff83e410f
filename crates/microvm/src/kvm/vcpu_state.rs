//! The complete state of one vCPU: reads it, writes it as sections, and loads it in the order that
//! KVM requires.

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, Msrs, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state,
    kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs,
};
use kvm_ioctls::VcpuFd;
use vmferry_memory::GuestBytes;
use zerocopy::IntoBytes;

use super::KvmError;
use super::ioctl::{self, Sregs2, XSAVE_BYTES};
use crate::state::{SectionKind, StateReader, StateWriter};

const CPUID: SectionKind = SectionKind::mandatory("vcpu.cpuid", 1);
const TSC_KHZ: SectionKind = SectionKind::mandatory("vcpu.tsc_khz", 1);
const MP_STATE: SectionKind = SectionKind::mandatory("vcpu.mp_state", 1);
const REGS: SectionKind = SectionKind::mandatory("vcpu.regs", 1);
const SREGS: SectionKind = SectionKind::mandatory("vcpu.sregs", 1);
const SREGS2: SectionKind = SectionKind::mandatory("vcpu.sregs2", 1);
const XSAVE: SectionKind = SectionKind::mandatory("vcpu.xsave", 1);
const XCRS: SectionKind = SectionKind::mandatory("vcpu.xcrs", 1);
const LAPIC: SectionKind = SectionKind::mandatory("vcpu.lapic", 1);
const MSRS: SectionKind = SectionKind::mandatory("vcpu.msrs", 1);
const DEBUG_REGS: SectionKind = SectionKind::mandatory("vcpu.debug_regs", 1);
const EVENTS: SectionKind = SectionKind::mandatory("vcpu.events", 1);

/// The sections of a vCPU.
pub(super) const SECTIONS: &[SectionKind] =
    &[CPUID, TSC_KHZ, MP_STATE, REGS, SREGS, SREGS2, XSAVE, XCRS, LAPIC, MSRS, DEBUG_REGS, EVENTS];

/// More MSRs than any KVM lists.
const MSRS_MAX: usize = 1024;
/// Larger than any XSAVE area (with AMX: 11 KiB).
const XSAVE_MAX_BYTES: usize = 64 << 10;
/// The difference of two TSC rates that a guest tolerates: KVM's own tolerance, 250 ppm.
const TSC_TOLERANCE_PPM: u64 = 250;

/// The features of this host's KVM, read once for each machine.
#[derive(Clone, Debug)]
pub(super) struct KvmFeatures {
    pub(super) sregs2: bool,
    pub(super) xsave_bytes: usize,
    /// The MSRs that KVM lists to be saved.
    pub(super) msrs: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
enum SystemRegisters {
    Old(kvm_sregs),
    New(Sregs2),
}

/// The complete state of a vCPU.
pub(super) struct VcpuState {
    cpuid: Vec<kvm_cpuid_entry2>,
    /// 0 if KVM does not report it.
    tsc_khz: u32,
    mp_state: kvm_mp_state,
    regs: kvm_regs,
    sregs: SystemRegisters,
    xsave: GuestBytes,
    xcrs: kvm_xcrs,
    lapic: kvm_lapic_state,
    msrs: Vec<kvm_msr_entry>,
    debug_regs: kvm_debugregs,
    events: kvm_vcpu_events,
}

impl VcpuState {
    /// Reads a parked vCPU. To be called on its own thread.
    pub(super) fn save(fd: &VcpuFd, vcpu: u32, has: &KvmFeatures) -> Result<Self, KvmError> {
        let refused = |what| KvmError::vcpu(vcpu, what);
        // First, because this ioctl makes KVM apply pending INIT and SIPI events to the rest of the
        // state.
        let mp_state = fd.get_mp_state().map_err(refused("KVM_GET_MP_STATE"))?;
        let sregs = if has.sregs2 {
            let refused = |source| KvmError::Vcpu { vcpu, what: "KVM_GET_SREGS2", source };
            SystemRegisters::New(ioctl::sregs2(fd).map_err(refused)?)
        } else {
            SystemRegisters::Old(fd.get_sregs().map_err(refused("KVM_GET_SREGS"))?)
        };
        let xsave = ioctl::xsave(fd, has.xsave_bytes);
        let cpuid = fd.get_cpuid2(KVM_MAX_CPUID_ENTRIES).map_err(refused("KVM_GET_CPUID2"))?;
        Ok(Self {
            mp_state,
            regs: fd.get_regs().map_err(refused("KVM_GET_REGS"))?,
            sregs,
            xsave: xsave.map_err(|source| KvmError::Vcpu {
                vcpu,
                what: "KVM_GET_XSAVE2",
                source,
            })?,
            xcrs: fd.get_xcrs().map_err(refused("KVM_GET_XCRS"))?,
            lapic: fd.get_lapic().map_err(refused("KVM_GET_LAPIC"))?,
            msrs: read_msrs(fd, vcpu, &has.msrs)?,
            debug_regs: fd.get_debug_regs().map_err(refused("KVM_GET_DEBUGREGS"))?,
            // Last, because the ioctls before may have turned a pending event into an injected one.
            events: fd.get_vcpu_events().map_err(refused("KVM_GET_VCPU_EVENTS"))?,
            cpuid: cpuid.as_slice().to_vec(),
            tsc_khz: fd.get_tsc_khz().unwrap_or(0),
        })
    }

    /// Loads this state into a vCPU that never ran. To be called on its own thread.
    pub(super) fn load(&self, fd: &VcpuFd, vcpu: u32, has: &KvmFeatures) -> Result<(), KvmError> {
        let refused = |what| KvmError::vcpu(vcpu, what);
        let invalid =
            |what| KvmError::Vcpu { vcpu, what, source: std::io::ErrorKind::InvalidInput.into() };
        // CPUID decides which registers exist. The TSC's rate must be set before its value.
        let cpuid = CpuId::from_entries(&self.cpuid).map_err(|_| invalid("KVM_SET_CPUID2"))?;
        fd.set_cpuid2(&cpuid).map_err(refused("KVM_SET_CPUID2"))?;
        set_tsc_khz(fd, self.tsc_khz)?;
        fd.set_mp_state(self.mp_state).map_err(refused("KVM_SET_MP_STATE"))?;
        fd.set_regs(&self.regs).map_err(refused("KVM_SET_REGS"))?;
        match &self.sregs {
            SystemRegisters::Old(sregs) => fd.set_sregs(sregs).map_err(refused("KVM_SET_SREGS"))?,
            SystemRegisters::New(sregs) => ioctl::set_sregs2(fd, sregs)
                .map_err(|source| KvmError::Vcpu { vcpu, what: "KVM_SET_SREGS2", source })?,
        }
        ioctl::set_xsave(fd, &self.xsave, has.xsave_bytes).map_err(|source| KvmError::Vcpu {
            vcpu,
            what: "KVM_SET_XSAVE",
            source,
        })?;
        fd.set_xcrs(&self.xcrs).map_err(refused("KVM_SET_XCRS"))?;
        // After SREGS, which set the LAPIC's address and mode. Before the MSRs, because
        // TSC_DEADLINE arms the LAPIC's timer and is ignored in any other timer mode.
        fd.set_lapic(&self.lapic).map_err(refused("KVM_SET_LAPIC"))?;
        write_msrs(fd, vcpu, &self.msrs)?;
        fd.set_debug_regs(&self.debug_regs).map_err(refused("KVM_SET_DEBUGREGS"))?;
        // Last, so that nothing above changes the pending events.
        fd.set_vcpu_events(&self.events).map_err(refused("KVM_SET_VCPU_EVENTS"))
    }

    /// Appends the sections of vCPU `vcpu`.
    pub(super) fn write(&self, vcpu: u32, out: &mut StateWriter) -> Result<(), KvmError> {
        out.abi(&CPUID, vcpu, self.cpuid.as_bytes())?;
        out.section(&TSC_KHZ, vcpu, &self.tsc_khz.to_le_bytes())?;
        out.abi(&MP_STATE, vcpu, &self.mp_state)?;
        out.abi(&REGS, vcpu, &self.regs)?;
        match &self.sregs {
            SystemRegisters::Old(sregs) => out.abi(&SREGS, vcpu, sregs)?,
            SystemRegisters::New(sregs) => out.abi(&SREGS2, vcpu, sregs)?,
        }
        out.section(&XSAVE, vcpu, &self.xsave)?;
        out.abi(&XCRS, vcpu, &self.xcrs)?;
        out.abi(&LAPIC, vcpu, &self.lapic)?;
        out.abi(&MSRS, vcpu, self.msrs.as_bytes())?;
        out.abi(&DEBUG_REGS, vcpu, &self.debug_regs)?;
        out.abi(&EVENTS, vcpu, &self.events)?;
        Ok(())
    }

    /// Parses the sections of vCPU `vcpu`, and refuses state that this host cannot load.
    pub(super) fn read(
        vcpu: u32,
        from: &StateReader<'_>,
        has: &KvmFeatures,
    ) -> Result<Self, KvmError> {
        let sregs = match from.optional(&SREGS2, vcpu)? {
            Some(section) if has.sregs2 => SystemRegisters::New(section.abi()?),
            Some(section) => {
                return Err(section.invalid("this host's KVM has no KVM_SET_SREGS2".into()).into());
            }
            None => SystemRegisters::Old(from.section(&SREGS, vcpu)?.abi()?),
        };
        let xsave = from.section(&XSAVE, vcpu)?;
        let bytes = xsave.payload().len();
        if !(XSAVE_BYTES..=XSAVE_MAX_BYTES).contains(&bytes) {
            return Err(xsave
                .invalid(format!("{bytes} bytes, expected {XSAVE_BYTES} to {XSAVE_MAX_BYTES}"))
                .into());
        }
        // A larger area is accepted if the components that this host lacks are unused.
        if xsave.payload().iter().skip(has.xsave_bytes).any(|&byte| byte != 0) {
            let reason =
                format!("{bytes} bytes of XSAVE are in use, but this host has {}", has.xsave_bytes);
            return Err(xsave.invalid(reason).into());
        }
        Ok(Self {
            cpuid: from.section(&CPUID, vcpu)?.abi_list(KVM_MAX_CPUID_ENTRIES)?,
            tsc_khz: u32::from_le_bytes(from.section(&TSC_KHZ, vcpu)?.abi()?),
            mp_state: from.section(&MP_STATE, vcpu)?.abi()?,
            regs: from.section(&REGS, vcpu)?.abi()?,
            sregs,
            xsave: xsave.payload().into(),
            xcrs: from.section(&XCRS, vcpu)?.abi()?,
            lapic: from.section(&LAPIC, vcpu)?.abi()?,
            msrs: from.section(&MSRS, vcpu)?.abi_list(MSRS_MAX)?,
            debug_regs: from.section(&DEBUG_REGS, vcpu)?.abi()?,
            events: from.section(&EVENTS, vcpu)?.abi()?,
        })
    }
}

/// Reads the readable MSRs of `indices`. KVM also lists MSRs that this processor or this guest's
/// CPUID lacks. They do not exist for the guest, so there is nothing to save.
fn read_msrs(fd: &VcpuFd, vcpu: u32, indices: &[u32]) -> Result<Vec<kvm_msr_entry>, KvmError> {
    let mut read = Vec::with_capacity(indices.len());
    let mut rest = indices;
    while !rest.is_empty() {
        let entries: Vec<_> =
            rest.iter().map(|&index| kvm_msr_entry { index, ..Default::default() }).collect();
        let mut msrs = wrap(vcpu, &entries)?;
        let count =
            fd.get_msrs(&mut msrs).map_err(KvmError::vcpu(vcpu, "KVM_GET_MSRS"))?.min(rest.len());
        read.extend_from_slice(&msrs.as_slice()[..count]);
        rest = rest.get(count + 1..).unwrap_or_default();
    }
    Ok(read)
}

fn write_msrs(fd: &VcpuFd, vcpu: u32, entries: &[kvm_msr_entry]) -> Result<(), KvmError> {
    let mut rest = entries;
    while !rest.is_empty() {
        let msrs = wrap(vcpu, rest)?;
        let count = fd.set_msrs(&msrs).map_err(KvmError::vcpu(vcpu, "KVM_SET_MSRS"))?;
        let Some(refused) = rest.get(count) else { break };
        if !is_harmless(fd, refused) {
            return Err(KvmError::Msr { vcpu, index: refused.index, value: refused.data });
        }
        rest = &rest[count + 1..];
    }
    Ok(())
}

/// Whether a refused MSR already has the value that it should be set to. Several MSRs are read-only
/// or derived from CPUID, which has been set before.
fn is_harmless(fd: &VcpuFd, refused: &kvm_msr_entry) -> bool {
    let here = Msrs::from_entries(&[kvm_msr_entry { index: refused.index, ..Default::default() }]);
    here.is_ok_and(|mut here| {
        fd.get_msrs(&mut here).is_ok_and(|count| count == 1)
            && here.as_slice()[0].data == refused.data
    })
}

fn wrap(vcpu: u32, entries: &[kvm_msr_entry]) -> Result<Msrs, KvmError> {
    let source = std::io::ErrorKind::InvalidInput.into();
    Msrs::from_entries(entries).map_err(|_| KvmError::Vcpu { vcpu, what: "KVM_SET_MSRS", source })
}

fn set_tsc_khz(fd: &VcpuFd, saved: u32) -> Result<(), KvmError> {
    let here = fd.get_tsc_khz().unwrap_or(0);
    let close = u64::from(saved.abs_diff(here)) * 1_000_000 <= u64::from(here) * TSC_TOLERANCE_PPM;
    if saved == 0 || close {
        return Ok(());
    }
    fd.set_tsc_khz(saved).map_err(|error| KvmError::TscFrequency {
        saved,
        here,
        source: error.into(),
    })
}
