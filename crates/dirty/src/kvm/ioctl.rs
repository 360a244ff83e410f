//! The ioctls of KVM.
//!
//! kvm-ioctls lacks `KVM_CLEAR_DIRTY_LOG` and the dirty ring, and its `get_dirty_log` is safe only
//! if the caller passes the slot's true size; here the size is part of the slot.

use std::io;
use std::os::fd::AsRawFd;

use kvm_bindings::{
    KVM_CAP_DIRTY_LOG_RING, KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
    KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE, KVM_MEM_LOG_DIRTY_PAGES, kvm_enable_cap,
    kvm_userspace_memory_region,
};
use kvm_ioctls::VmFd;

use super::ring_memory::ENTRY_BYTES;
use super::slot::KvmSlot;

/// `_IOW(KVMIO, 0x42, struct kvm_dirty_log)`.
const KVM_GET_DIRTY_LOG: libc::c_ulong = 0x4010_ae42;
/// `_IOWR(KVMIO, 0xc0, struct kvm_clear_dirty_log)`.
const KVM_CLEAR_DIRTY_LOG: libc::c_ulong = 0xc018_aec0;
/// `_IO(KVMIO, 0xc7)`.
const KVM_RESET_DIRTY_RINGS: libc::c_ulong = 0xaec7;

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

/// Turns the logging of a slot on or off by setting the same memory region again.
pub(super) fn set_logging(vm: &VmFd, slot: &KvmSlot, on: bool) -> io::Result<()> {
    let region = kvm_userspace_memory_region {
        slot: slot.kvm_slot,
        flags: if on { KVM_MEM_LOG_DIRTY_PAGES } else { 0 },
        guest_phys_addr: slot.gpa,
        memory_size: slot.bytes,
        userspace_addr: slot.host_address,
    };
    // SAFETY: the region is the one that the machine already has, with other flags. KVM refuses any
    // change of address or size of an existing slot (EINVAL), so the guest gets no memory that it
    // did not have.
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
    // (kvm_dirty_bitmap_bytes), which is the length of `words`, as just asserted. The slot's length
    // is the same in KVM: a region with the same number and another length would have been refused
    // when logging was turned on.
    let result = unsafe { libc::ioctl(vm.as_raw_fd(), KVM_GET_DIRTY_LOG, &raw mut argument) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Clears the bits that are set in `words`, which begin at page `64 * first_word`, and protects
/// their pages.
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
    // SAFETY: KVM reads `num_pages` bits, rounded up to whole words, from `dirty_bitmap`. That is
    // no more than `words` has, as computed above. It writes no memory of this process.
    let result = unsafe { libc::ioctl(vm.as_raw_fd(), KVM_CLEAR_DIRTY_LOG, &raw mut argument) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Whether KVM supports manual clear.
pub(super) fn has_manual_clear(vm: &VmFd) -> bool {
    let options = vm.check_extension_raw(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2.into());
    options > 0 && options as u32 & KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE != 0
}

/// Selects manual clear or clearing at each read, for the whole machine.
pub(super) fn set_manual_clear(vm: &VmFd, on: bool) -> io::Result<()> {
    let capability = kvm_enable_cap {
        cap: KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
        args: [if on { KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE.into() } else { 0 }, 0, 0, 0],
        ..kvm_enable_cap::default()
    };
    vm.enable_cap(&capability)?;
    Ok(())
}

/// The capability by which this KVM supports dirty rings, and the maximum number of entries of a
/// ring. The capability with ordered accesses is from Linux 6.1; on x86-64 both mean the same.
pub(super) fn ring_limit(vm: &VmFd) -> Option<(u32, u32)> {
    [KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_DIRTY_LOG_RING].into_iter().find_map(|capability| {
        // KVM returns the size in bytes.
        let bytes = usize::try_from(vm.check_extension_raw(capability.into())).ok()?;
        let entries = u32::try_from(bytes / ENTRY_BYTES).ok()?;
        (entries > 0).then_some((capability, entries))
    })
}

/// Turns the rings on. No vCPU may exist yet.
pub(super) fn enable_ring(vm: &VmFd, entries: u32) -> io::Result<()> {
    let (cap, _) = ring_limit(vm).ok_or(io::ErrorKind::Unsupported)?;
    let args = [u64::from(entries) * ENTRY_BYTES as u64, 0, 0, 0];
    vm.enable_cap(&kvm_enable_cap { cap, args, ..kvm_enable_cap::default() })?;
    Ok(())
}

/// Whether the machine's rings are on: only then can they be reset. The check itself resets
/// harvested entries, which the harvester would do anyway.
pub(super) fn has_ring(vm: &VmFd) -> bool {
    reset_dirty_rings(vm).is_ok()
}

/// Makes KVM protect the pages of all harvested entries of every vCPU again and free the entries.
///
/// Signals are blocked. Since Linux 6.17 a pending signal makes `kvm_dirty_ring_reset` return at
/// once, and the up to 64 pages that it had gathered for one call of
/// `kvm_arch_mmu_enable_log_dirty_pt_masked` are treated as protected but are not. All of their
/// later writes are lost (seen on 6.18: 1 to 52 pages each time, and the call succeeds). A pending
/// signal is common here, because a vCPU thread that makes room in its ring may just have been
/// kicked to pause it. SIGSTOP and debuggers cannot be blocked, so this risk remains for them.
pub(super) fn reset_dirty_rings(vm: &VmFd) -> io::Result<()> {
    let blocked = SignalsBlocked::new();
    // SAFETY: the request has no argument. In this process it changes only flags of the rings,
    // which are atomics wherever they are mapped.
    let result = unsafe { libc::ioctl(vm.as_raw_fd(), KVM_RESET_DIRTY_RINGS, 0) };
    let outcome = if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
    drop(blocked);
    outcome
}

/// Blocks all signals for this thread until it is dropped.
struct SignalsBlocked(libc::sigset_t);

impl SignalsBlocked {
    fn new() -> Self {
        // SAFETY: all zeroes are a valid `sigset_t`, which the call overwrites.
        let mut before: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: both pointers are to local sets; neither call fails with these arguments.
        unsafe {
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        }
        Self(before)
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: the set is the one that `new` saved; the call cannot fail.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut())
        };
    }
}
