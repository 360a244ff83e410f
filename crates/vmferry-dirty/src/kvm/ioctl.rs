//! The calls into KVM.
//!
//! kvm-ioctls lacks `KVM_CLEAR_DIRTY_LOG`, and its `get_dirty_log` is safe only if the caller
//! passes the slot's true size; here the slot carries it.

use std::io;
use std::os::fd::AsRawFd;

use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE,
    KVM_MEM_LOG_DIRTY_PAGES, kvm_enable_cap, kvm_userspace_memory_region,
};
use kvm_ioctls::VmFd;

use super::slots::KvmSlot;

/// `_IOW(KVMIO, 0x42, struct kvm_dirty_log)`.
const KVM_GET_DIRTY_LOG: libc::c_ulong = 0x4010_ae42;
/// `_IOWR(KVMIO, 0xc0, struct kvm_clear_dirty_log)`.
const KVM_CLEAR_DIRTY_LOG: libc::c_ulong = 0xc018_aec0;

/// `struct kvm_dirty_log`.
#[repr(C)]
struct KvmDirtyLog {
    slot: u32,
    padding: u32,
    dirty_bitmap: u64,
}
const _: () = assert!(size_of::<KvmDirtyLog>() == 16);

/// `struct kvm_clear_dirty_log`.
#[repr(C)]
struct KvmClearDirtyLog {
    slot: u32,
    num_pages: u32,
    first_page: u64,
    dirty_bitmap: u64,
}
const _: () = assert!(size_of::<KvmClearDirtyLog>() == 24);

/// Turns the logging of a slot on or off, by setting the same memory region again.
pub(super) fn set_logging(vm: &VmFd, slot: &KvmSlot, on: bool) -> io::Result<()> {
    let region = kvm_userspace_memory_region {
        slot: slot.kvm_slot,
        flags: if on { KVM_MEM_LOG_DIRTY_PAGES } else { 0 },
        guest_phys_addr: slot.gpa,
        memory_size: slot.bytes,
        userspace_addr: slot.host_address,
    };
    // SAFETY: the region is the one that the machine already has, with other flags: KVM refuses
    // any change of address or size of a slot that exists (EINVAL), so the guest gets no memory
    // that it did not have.
    unsafe { vm.set_user_memory_region(region) }?;
    Ok(())
}

/// Reads the bitmap of a slot into `words`.
///
/// # Panics
/// If `words` is not as long as the slot's bitmap.
pub(super) fn dirty_log(vm: &VmFd, slot: &KvmSlot, words: &mut [u64]) -> io::Result<()> {
    assert_eq!(words.len() as u64, slot.pages().div_ceil(64), "the length of {slot:?}");
    let mut argument =
        KvmDirtyLog { slot: slot.kvm_slot, padding: 0, dirty_bitmap: words.as_mut_ptr() as u64 };
    // SAFETY: KVM writes the slot's pages rounded up to 64, as bits, to `dirty_bitmap`
    // (kvm_dirty_bitmap_bytes), which is the length of `words` as just asserted. The slot's length
    // is KVM's own: a region of that number and another length would have been refused when
    // logging was turned on.
    let result = unsafe { libc::ioctl(vm.as_raw_fd(), KVM_GET_DIRTY_LOG, &raw mut argument) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Clears the bits that are set in `words` and protects their pages, from page
/// `64 * first_word` on.
pub(super) fn clear_dirty_log(
    vm: &VmFd,
    slot: &KvmSlot,
    first_word: usize,
    words: &[u64],
) -> io::Result<()> {
    let first_page = first_word as u64 * 64;
    // The count must be a multiple of 64, except at the slot's end (api.rst, 4.117).
    let pages = (words.len() as u64 * 64).min(slot.pages().saturating_sub(first_page));
    let num_pages = u32::try_from(pages).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut argument = KvmClearDirtyLog {
        slot: slot.kvm_slot,
        num_pages,
        first_page,
        dirty_bitmap: words.as_ptr() as u64,
    };
    // SAFETY: KVM reads `num_pages` bits, rounded up to whole words, from `dirty_bitmap`: no more
    // than `words` has, as computed above. It writes nothing of ours.
    let result = unsafe { libc::ioctl(vm.as_raw_fd(), KVM_CLEAR_DIRTY_LOG, &raw mut argument) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Whether KVM has manual clear.
pub(super) fn has_manual_clear(vm: &VmFd) -> bool {
    let options = vm.check_extension_raw(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2.into());
    options > 0 && options as u32 & KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE != 0
}

/// Chooses between manual clear and clearing at each read, for the whole machine.
pub(super) fn set_manual_clear(vm: &VmFd, on: bool) -> io::Result<()> {
    let capability = kvm_enable_cap {
        cap: KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
        args: [if on { KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE.into() } else { 0 }, 0, 0, 0],
        ..kvm_enable_cap::default()
    };
    vm.enable_cap(&capability)?;
    Ok(())
}
