//! The vCPU ioctls that kvm-ioctls does not wrap safely: SREGS2, and the XSAVE area at its full
//! size.
//!
//! Rule that every `unsafe` block here upholds: the kernel copies exactly the size that is encoded
//! in the request's number, or for XSAVE2 the size that `KVM_CAP_XSAVE2` reports. The buffers are
//! at least that large and live across the call.

use std::io;

use kvm_bindings::{KVM_CAP_XSAVE2, KVMIO, kvm_dtable, kvm_segment, kvm_sregs2, kvm_xsave};
use kvm_ioctls::{VcpuFd, VmFd};
use vmferry_memory::GuestBytes;
use vmm_sys_util::ioctl::{ioctl_with_mut_ptr, ioctl_with_mut_ref, ioctl_with_ptr, ioctl_with_ref};
use vmm_sys_util::{ioctl_ior_nr, ioctl_iow_nr};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// `struct kvm_sregs2` with the traits that make it safe to copy as bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Sregs2 {
    pub(super) segments: [kvm_segment; 8],
    pub(super) tables: [kvm_dtable; 2],
    pub(super) cr0: u64,
    pub(super) cr2: u64,
    pub(super) cr3: u64,
    pub(super) cr4: u64,
    pub(super) cr8: u64,
    pub(super) efer: u64,
    pub(super) apic_base: u64,
    pub(super) flags: u64,
    pub(super) pdptrs: [u64; 4],
}

const _: () = assert!(size_of::<Sregs2>() == size_of::<kvm_sregs2>());

ioctl_ior_nr!(KVM_GET_SREGS2, KVMIO, 0xcc, kvm_sregs2);
ioctl_iow_nr!(KVM_SET_SREGS2, KVMIO, 0xcd, kvm_sregs2);
ioctl_ior_nr!(KVM_GET_XSAVE, KVMIO, 0xa4, kvm_xsave);
ioctl_iow_nr!(KVM_SET_XSAVE, KVMIO, 0xa5, kvm_xsave);
ioctl_ior_nr!(KVM_GET_XSAVE2, KVMIO, 0xcf, kvm_xsave);

/// Bytes of the legacy XSAVE area, which KVM uses if it has no larger one.
pub(super) const XSAVE_BYTES: usize = 4096;

/// Bytes of a vCPU's XSAVE area on this host.
pub(super) fn xsave_bytes(vm: &VmFd) -> usize {
    // Zero or an error where the kernel does not know the capability.
    usize::try_from(vm.check_extension_raw(KVM_CAP_XSAVE2.into())).unwrap_or(0).max(XSAVE_BYTES)
}

pub(super) fn sregs2(fd: &VcpuFd) -> io::Result<Sregs2> {
    let mut sregs = Sregs2::new_zeroed();
    // SAFETY: The kernel writes a `struct kvm_sregs2`, which is as large as `Sregs2`.
    done(unsafe { ioctl_with_mut_ref(fd, KVM_GET_SREGS2(), &mut sregs) })?;
    Ok(sregs)
}

pub(super) fn set_sregs2(fd: &VcpuFd, sregs: &Sregs2) -> io::Result<()> {
    // SAFETY: The kernel reads a `struct kvm_sregs2`, which is as large as `Sregs2`.
    done(unsafe { ioctl_with_ref(fd, KVM_SET_SREGS2(), sregs) })
}

/// Reads the vCPU's XSAVE area. `bytes` must be what [`xsave_bytes`] returned.
pub(super) fn xsave(fd: &VcpuFd, bytes: usize) -> io::Result<GuestBytes> {
    let mut area = GuestBytes::new();
    area.extend_to(bytes.max(XSAVE_BYTES));
    let request = if bytes > XSAVE_BYTES { KVM_GET_XSAVE2() } else { KVM_GET_XSAVE() };
    // SAFETY: GET_XSAVE writes 4,096 bytes, and GET_XSAVE2 the size that `KVM_CAP_XSAVE2` reports,
    // which the caller passes in `bytes`. The area is that large.
    done(unsafe { ioctl_with_mut_ptr(fd, request, area.as_mut_ptr()) })?;
    Ok(area)
}

/// Sets the vCPU's XSAVE area. `area` may be shorter than this host's (`bytes`). The rest is then
/// zero, which is the initial state of the components in it.
pub(super) fn set_xsave(fd: &VcpuFd, area: &[u8], bytes: usize) -> io::Result<()> {
    let mut padded = GuestBytes::from(area);
    padded.extend_to(bytes.max(XSAVE_BYTES));
    // SAFETY: The kernel reads at most the size that `KVM_CAP_XSAVE2` reports, and `padded` is that
    // large.
    done(unsafe { ioctl_with_ptr(fd, KVM_SET_XSAVE(), padded.as_ptr()) })
}

fn done(returned: libc::c_int) -> io::Result<()> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Whether KVM has `KVM_GET_SREGS2`.
pub(super) fn has_sregs2(vm: &VmFd) -> bool {
    vm.check_extension_raw(kvm_bindings::KVM_CAP_SREGS2.into()) > 0
}
