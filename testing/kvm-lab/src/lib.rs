//! A real KVM guest that writes chosen pages, for tests and benchmarks of dirty logs.
//!
//! A [`Machine`] has any memory slots and 1 to 8 vCPUs, and no firmware, kernel or device: its
//! vCPUs are put directly into 64-bit mode, at ring 3, on a few instructions of machine code. The
//! caller chooses which pages a vCPU writes ([`Machine::write_pages`], [`Machine::write_run`]) and
//! gets control back when they are written, or has the vCPU write a range forever
//! ([`Machine::start_loop`]).
//!
//! Code, page tables and the data that guest and host exchange are in a memory slot of the lab's
//! own, above all others, which no dirty log covers: every page that a log reports was written at
//! the caller's request.
//!
//! The guest writes its pages at ring 3 because ring 3 is native code on every KVM; some emulate
//! ring 0. It signals completion by a write to an address without memory, since ring 3 may not
//! access I/O ports.
//!
//! `unsafe` is confined to this file (KVM's memory slots, the guest's counter), `vcpu` (the shared
//! `immediate_exit` byte, a signal's handler) and `looping` (the signal).

mod error;
mod guest;
mod looping;
mod vcpu;

pub use error::LabError;
pub use looping::WriteLoop;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvm_bindings::{
    KVM_CAP_DIRTY_LOG_RING, KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_MAX_CPUID_ENTRIES, kvm_enable_cap,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use parking_lot::RwLock;
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, SlotId, SlotLayout};

use guest::{Entry, LIST_ENTRIES, Placement};
use vcpu::Vcpu;

/// The most vCPUs: each has a word of its own in every page, and a list of its own.
pub const MAX_VCPUS: usize = 8;

/// The size of `struct kvm_dirty_gfn`, the entry of a dirty ring.
const RING_ENTRY_BYTES: u32 = 16;

/// Options of a machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct LabOptions {
    /// Enables KVM's dirty ring, with this number of entries for each vCPU; KVM then has no
    /// bitmaps.
    pub dirty_ring_entries: Option<u32>,
}

/// A memory slot that the caller has requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LabSlot {
    /// Its number in [`Machine::memory`].
    pub slot: SlotId,
    /// Its number in KVM, which differs.
    pub kvm_slot: u32,
    /// Guest-physical address in bytes.
    pub gpa: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Host-virtual address.
    pub host_address: u64,
}

/// Called by a vCPU's thread, with the vCPU's number, when its dirty ring is full. It must make
/// room, or the guest does not continue.
pub type RingFullHook = dyn Fn(usize) + Send + Sync;

/// A machine. A vCPU may be used by one caller at a time.
pub struct Machine {
    vcpus: Vec<Arc<Vcpu>>,
    vm: Arc<VmFd>,
    slots: Vec<LabSlot>,
    shared: Arc<Shared>,
}

/// The state that a vCPU needs and keeps alive: above all the memory that it can write.
struct Shared {
    placement: Placement,
    ring_full: RwLock<Option<Box<RingFullHook>>>,
    ring_full_exits: AtomicU64,
    lab: GuestMemory,
    memory: GuestMemory,
}

impl Machine {
    /// Creates a machine with new memory of a layout.
    ///
    /// # Errors
    /// [`LabError`]: an impossible layout or number of vCPUs, or a request that KVM refuses.
    pub fn new(
        layout: &[SlotLayout],
        kind: MemoryKind,
        vcpus: usize,
        options: LabOptions,
    ) -> Result<Self, LabError> {
        Self::over(GuestMemory::allocate(layout, kind)?, vcpus, options)
    }

    /// Creates a machine with the caller's memory.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn over(memory: GuestMemory, vcpus: usize, options: LabOptions) -> Result<Self, LabError> {
        if !(1..=MAX_VCPUS).contains(&vcpus) {
            return Err(LabError::Vcpus { asked: vcpus });
        }
        let placement = Placement::beyond(&memory.layout())?;
        let kvm = Kvm::new().map_err(LabError::kvm("/dev/kvm"))?;
        let vm = kvm.create_vm().map_err(LabError::kvm("KVM_CREATE_VM"))?;
        if let Some(entries) = options.dirty_ring_entries {
            enable_dirty_ring(&vm, entries)?;
        }
        let lab = GuestMemory::allocate(&placement.layout(), MemoryKind::Private)?;
        placement.write(&lab)?;
        add_slots(&vm, 0, &lab)?;
        let slots = add_slots(&vm, 1, &memory)?;
        let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
        let cpuid = cpuid.map_err(LabError::kvm("KVM_GET_SUPPORTED_CPUID"))?;
        let shared = Arc::new(Shared {
            placement,
            ring_full: RwLock::new(None),
            ring_full_exits: AtomicU64::new(0),
            lab,
            memory,
        });
        let vcpus = (0..vcpus)
            .map(|index| {
                let fd = vm.create_vcpu(index as u64).map_err(LabError::kvm("KVM_CREATE_VCPU"))?;
                fd.set_cpuid2(&cpuid).map_err(LabError::kvm("KVM_SET_CPUID2"))?;
                Ok(Arc::new(Vcpu::new(index, fd, Arc::clone(&shared))?))
            })
            .collect::<Result<Vec<_>, LabError>>()?;
        Ok(Self { vcpus, vm: Arc::new(vm), slots, shared })
    }

    /// The machine's descriptor.
    #[must_use]
    pub fn vm(&self) -> &Arc<VmFd> {
        &self.vm
    }

    /// The memory of the requested slots.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        &self.shared.memory
    }

    /// The requested slots, as KVM has them.
    #[must_use]
    pub fn slots(&self) -> &[LabSlot] {
        &self.slots
    }

    /// Number of vCPUs.
    #[must_use]
    pub fn vcpus(&self) -> usize {
        self.vcpus.len()
    }

    /// Gives access to a vCPU's descriptor, such as to map its dirty ring.
    ///
    /// # Errors
    /// [`LabError::Busy`] while the vCPU writes.
    pub fn with_vcpu<T>(
        &self,
        vcpu: usize,
        look: impl FnOnce(&VcpuFd) -> T,
    ) -> Result<T, LabError> {
        self.vcpu(vcpu)?.lease().map(|mut lease| look(lease.fd()))
    }

    /// Sets the hook for a full dirty ring.
    pub fn on_ring_full(&self, hook: impl Fn(usize) + Send + Sync + 'static) {
        let mut kept = self.shared.ring_full.write();
        *kept = Some(Box::new(hook));
    }

    /// How often a vCPU left the guest because its dirty ring was full.
    #[must_use]
    pub fn ring_full_exits(&self) -> u64 {
        self.shared.ring_full_exits.load(Ordering::Relaxed)
    }

    /// Has a vCPU write each of these pages once, in this order: it increments the 64-bit word at
    /// byte 8 × `vcpu` of the page. All pages are written when this returns.
    ///
    /// # Errors
    /// [`LabError`]: a page beyond the slot, a vCPU in use, or an unexpected exit.
    pub fn write_pages(
        &self,
        vcpu: usize,
        slot: SlotId,
        pages: impl IntoIterator<Item = u64>,
    ) -> Result<(), LabError> {
        let mut lease = self.vcpu(vcpu)?.lease()?;
        let mut addresses = Vec::with_capacity(LIST_ENTRIES);
        let mut pages = pages.into_iter().peekable();
        while pages.peek().is_some() {
            addresses.clear();
            for page in pages.by_ref().take(LIST_ENTRIES) {
                addresses.push(self.address(vcpu, slot, page, 1)?);
            }
            let bytes: Vec<u8> = addresses.iter().flat_map(|gpa| gpa.to_le_bytes()).collect();
            let list = self.shared.placement.list(vcpu);
            self.shared.lab.write_at(list, &bytes)?;
            lease.call(Entry::List { list, count: addresses.len() as u64 })?;
        }
        Ok(())
    }

    /// The same for consecutive pages, which takes a single entry into the guest.
    ///
    /// # Errors
    /// As [`write_pages`](Self::write_pages).
    pub fn write_run(
        &self,
        vcpu: usize,
        slot: SlotId,
        first: u64,
        pages: u64,
    ) -> Result<(), LabError> {
        let address = self.address(vcpu, slot, first, pages)?;
        let mut lease = self.vcpu(vcpu)?.lease()?;
        if pages == 0 {
            return Ok(());
        }
        lease.call(Entry::Run { address, count: pages, stride: PAGE_SIZE as u64 })
    }

    /// Has a vCPU write consecutive pages over and over until the result is stopped or dropped.
    ///
    /// # Errors
    /// As [`write_pages`](Self::write_pages), and if there are no pages.
    pub fn start_loop(
        &self,
        vcpu: usize,
        slot: SlotId,
        first: u64,
        pages: u64,
    ) -> Result<WriteLoop, LabError> {
        let address = self.address(vcpu, slot, first, pages.max(1))?;
        let counter = self.shared.placement.counter(vcpu);
        let stride = PAGE_SIZE as u64;
        let lease = self.vcpu(vcpu)?.lease()?;
        WriteLoop::start(lease, Entry::Loop { address, count: pages.max(1), stride, counter })
    }

    fn vcpu(&self, vcpu: usize) -> Result<&Arc<Vcpu>, LabError> {
        self.vcpus.get(vcpu).ok_or(LabError::NoSuchVcpu { vcpu })
    }

    /// The address at which a vCPU writes a page. All pages must be in the slot.
    fn address(&self, vcpu: usize, slot: SlotId, first: u64, pages: u64) -> Result<u64, LabError> {
        let run = vmferry_memory::PageRun { slot, first, pages };
        let slot = self.memory().check_run(run)?;
        Ok(slot.gpa().0 + first * PAGE_SIZE as u64 + 8 * vcpu as u64)
    }
}

impl Shared {
    fn ring_full(&self, vcpu: usize) -> Result<(), LabError> {
        self.ring_full_exits.fetch_add(1, Ordering::Relaxed);
        match &*self.ring_full.read() {
            Some(hook) => {
                hook(vcpu);
                Ok(())
            }
            None => Err(LabError::RingFull { vcpu }),
        }
    }

    /// The number of pages that a vCPU's loops have written.
    fn written(&self, vcpu: usize) -> u64 {
        let at = self.placement.counter(vcpu) - self.placement.base();
        let address = self.lab.slots()[0].host_address().wrapping_add(at as usize);
        // SAFETY: the address is that of an aligned word of the lab's slot (`Placement::counter`),
        // which is mapped as long as `self.lab` is. Only the guest writes it.
        unsafe { AtomicU64::from_ptr(address.cast()) }.load(Ordering::Acquire)
    }
}

/// Adds each slot of `memory` to KVM, numbered from `first` on.
fn add_slots(vm: &VmFd, first: u32, memory: &GuestMemory) -> Result<Vec<LabSlot>, LabError> {
    let mut slots = Vec::new();
    for (kvm_slot, slot) in (first..).zip(memory.slots()) {
        let slot = LabSlot {
            slot: slot.id(),
            kvm_slot,
            gpa: slot.gpa().0,
            bytes: slot.len_bytes() as u64,
            host_address: slot.host_address() as u64,
        };
        let region = kvm_userspace_memory_region {
            slot: kvm_slot,
            flags: 0,
            guest_phys_addr: slot.gpa,
            memory_size: slot.bytes,
            userspace_addr: slot.host_address,
        };
        // SAFETY: the range is one mapping of `memory`. Each runner of a vCPU holds `Shared`, and
        // so the mapping.
        unsafe { vm.set_user_memory_region(region) }
            .map_err(LabError::kvm("KVM_SET_USER_MEMORY_REGION"))?;
        slots.push(slot);
    }
    Ok(slots)
}

/// Must be called before any vCPU is created. The argument of the capability is the ring's length
/// in bytes (Linux `Documentation/virt/kvm/api.rst`, section 8.29).
fn enable_dirty_ring(vm: &VmFd, entries: u32) -> Result<(), LabError> {
    let known = [KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_DIRTY_LOG_RING]
        .into_iter()
        .find(|cap| vm.check_extension_raw((*cap).into()) > 0);
    let cap = known.ok_or(LabError::NoDirtyRing)?;
    let args = [u64::from(entries) * u64::from(RING_ENTRY_BYTES), 0, 0, 0];
    vm.enable_cap(&kvm_enable_cap { cap, args, ..Default::default() })
        .map_err(LabError::kvm("KVM_CAP_DIRTY_LOG_RING"))
}

#[cfg(test)]
mod tests;
