//! Loads the guest into memory, and sets every vCPU to its 64-bit entry point.
//!
//! The guest-physical memory map is in `guest/kernel.h`. A vCPU starts in long mode at CPL 0 with
//! interrupts off, RDI = its index, and CR3 = identity tables of 2 MiB pages over all RAM and the
//! first 4 GiB (where the LAPIC is). The segment selectors are those of Linux, which a KVM without
//! nested hardware virtualization (PVM) requires and any other KVM accepts.

use std::io::Cursor;

use kvm_bindings::{KVM_MP_STATE_RUNNABLE, kvm_dtable, kvm_mp_state, kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;
use linux_loader::loader::{Elf, KernelLoader};
use vm_memory::bitmap::Bitmap;
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestMemoryMmap};

use super::{KvmError, MemorySlot};

/// The bare-metal guest, built from `guest/` by this crate's build script. Other VMMs boot this ELF
/// file by its PVH note.
pub static GUEST_ELF: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/guest.elf"));

/// End of low RAM. RAM continues at [`HIGH_RAM`]. The hole has room for the LAPIC and the IOAPIC.
pub const LOW_RAM_END: u64 = 3 << 30;
/// Start of high RAM.
pub const HIGH_RAM: u64 = 4 << 30;
/// Address of the frame buffer of the workload `display`. It is in the hole, where QEMU's VGA has
/// its frame buffer (`guest/report.h`).
pub const DISPLAY: u64 = 0xfd00_0000;
/// Address of the slot after the frame buffer, which the workload `display` writes only once.
pub const STILL: u64 = DISPLAY + DISPLAY_BYTES;
/// Size of each of these two slots.
pub const DISPLAY_BYTES: u64 = 32 << 10;
/// Size of the memory that is reserved for boot structures and the guest kernel. The memory of the
/// workload begins here.
const RESERVED_BYTES: u64 = 16 << 20;

const BOOT_PARAMETERS: u64 = 0x6000;
const COMMAND_LINE: u64 = 0x7000;
/// Size including the terminating NUL.
const COMMAND_LINE_BYTES: usize = 4096;
const PML4: u64 = 0x4_0000;
const PDPT: u64 = 0x4_1000;
const BOOT_GDT: u64 = 0x4_2000;
const PAGE_DIRECTORIES: u64 = 0x20_0000;
/// The page directories of one PDPT.
const MAPPED_GIB_MAX: u64 = 512;

const BOOT_MAGIC: u64 = u64::from_le_bytes(*b"VMFERRYB");
const BOOT_VERSION: u32 = 3;

/// Flags: present, writable, user. The workload runs in ring 3 on the same tables.
const TABLE: u64 = 0x7;
/// Flags: those of `TABLE`, and a page of 2 MiB.
const LARGE_PAGE: u64 = 0x87;

const KERNEL_CS: u16 = 0x10;
const KERNEL_DS: u16 = 0x18;
/// For the first instructions only: the guest then loads its own table.
const GDT: [u64; 4] = [0, 0x00cf_9b00_0000_ffff, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff];

/// PE, MP, ET, NE, WP, AM, PG: as Linux sets them.
const CR0: u64 = 0x8005_0033;
/// PAE, OSFXSR, OSXMMEXCPT.
const CR4: u64 = 0x620;
/// LME and LMA.
const EFER: u64 = 0x500;
/// The reserved bit that is always set.
const RFLAGS: u64 = 2;

/// `struct boot_parameters` in the guest.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct BootParameters {
    magic: u64,
    version: u32,
    vcpus: u32,
    low_bytes: u64,
    high_bytes: u64,
    has_display: u64,
    balloon_address: u64,
}

const _: () = assert!(size_of::<BootParameters>() == 48);

// SAFETY: `ByteValued` needs plain data without padding: a u64, two u32 and four u64 have none.
unsafe impl ByteValued for BootParameters {}

/// Guest memory with any type of dirty bitmap. The machine loads the guest into it, and keeps it
/// alive.
pub(super) trait GuestRam: Send + Sync {
    /// Writes the guest, its boot parameters, command line, page tables and GDT into the memory.
    /// Returns the entry point of the vCPUs.
    fn load_guest(
        &self,
        slots: &[MemorySlot],
        vcpus: u32,
        command_line: &str,
        balloon_address: u64,
    ) -> Result<u64, KvmError>;
}

impl<B: Bitmap + Send + Sync> GuestRam for GuestMemoryMmap<B> {
    fn load_guest(
        &self,
        slots: &[MemorySlot],
        vcpus: u32,
        command_line: &str,
        balloon_address: u64,
    ) -> Result<u64, KvmError> {
        let (low_bytes, high_bytes) = check_layout(slots)?;
        let parameters = BootParameters {
            magic: BOOT_MAGIC,
            version: BOOT_VERSION,
            vcpus,
            low_bytes,
            high_bytes,
            has_display: slots.iter().any(|slot| slot.gpa == DISPLAY).into(),
            balloon_address,
        };
        write(self, BOOT_PARAMETERS, parameters.as_slice())?;
        write(self, COMMAND_LINE, &command_line_bytes(command_line)?)?;
        let gdt: Vec<u8> = GDT.iter().flat_map(|entry| entry.to_le_bytes()).collect();
        write(self, BOOT_GDT, &gdt)?;
        write_page_tables(self, high_bytes)?;
        let loaded = Elf::load(self, None, &mut Cursor::new(GUEST_ELF), None);
        let loaded = loaded
            .map_err(|error| KvmError::Boot { reason: format!("the guest's ELF file: {error}") })?;
        Ok(loaded.kernel_load.0)
    }
}

/// Checks that there is one slot at 0 of at most 3 GiB, optionally the two slots of the display,
/// and optionally one slot at 4 GiB. Returns the sizes of low and high RAM.
fn check_layout(slots: &[MemorySlot]) -> Result<(u64, u64), KvmError> {
    let config = |reason: String| Err(KvmError::Config { reason });
    let is_display = |slot: &MemorySlot, gpa| slot.gpa == gpa && slot.bytes == DISPLAY_BYTES;
    let ram = match slots {
        [low, display, still, high @ ..]
            if is_display(display, DISPLAY) && is_display(still, STILL) =>
        {
            [std::slice::from_ref(low), high].concat()
        }
        _ => slots.to_vec(),
    };
    let (low, high) = match &ram[..] {
        [low] if low.gpa == 0 => (low.bytes, 0),
        [low, high] if low.gpa == 0 && high.gpa == HIGH_RAM => (low.bytes, high.bytes),
        _ => {
            return config(format!(
                "memory must be one slot at 0, optionally the two of a display at {DISPLAY:#x}, \
                 and optionally one at {HIGH_RAM:#x}, not {slots:x?}"
            ));
        }
    };
    if low <= RESERVED_BYTES || low > LOW_RAM_END || high.div_ceil(1 << 30) > MAPPED_GIB_MAX - 4 {
        return config(format!(
            "memory of {low:#x} + {high:#x} bytes: more than 16 MiB and at most 508 GiB are needed"
        ));
    }
    Ok((low, high))
}

fn command_line_bytes(text: &str) -> Result<Vec<u8>, KvmError> {
    if text.len() >= COMMAND_LINE_BYTES || text.as_bytes().contains(&0) {
        let reason = format!(
            "a command line of {} bytes: at most 4,095 bytes without a NUL are allowed",
            text.len()
        );
        return Err(KvmError::Config { reason });
    }
    let mut bytes = text.as_bytes().to_vec();
    bytes.push(0);
    Ok(bytes)
}

fn write_page_tables<B: Bitmap>(
    memory: &GuestMemoryMmap<B>,
    high_bytes: u64,
) -> Result<(), KvmError> {
    let gib = 4 + high_bytes.div_ceil(1 << 30);
    write(memory, PML4, &(PDPT | TABLE).to_le_bytes())?;
    for index in 0..gib {
        let directory = PAGE_DIRECTORIES + index * 4096;
        write(memory, PDPT + index * 8, &(directory | TABLE).to_le_bytes())?;
        let entries =
            (0..512u64).flat_map(|entry| (index << 30 | entry << 21 | LARGE_PAGE).to_le_bytes());
        write(memory, directory, &entries.collect::<Vec<u8>>())?;
    }
    Ok(())
}

fn write<B: Bitmap>(memory: &GuestMemoryMmap<B>, gpa: u64, bytes: &[u8]) -> Result<(), KvmError> {
    let failed =
        |error| KvmError::Boot { reason: format!("{} bytes at {gpa:#x}: {error}", bytes.len()) };
    memory.write_slice(bytes, GuestAddress(gpa)).map_err(failed)
}

/// Sets a vCPU to the guest's entry point. To be called on the vCPU's own thread.
pub(super) fn set_entry(fd: &VcpuFd, vcpu: u32, entry: u64) -> Result<(), KvmError> {
    let mut sregs = fd.get_sregs().map_err(KvmError::vcpu(vcpu, "KVM_GET_SREGS"))?;
    let code = segment(KERNEL_CS, 0xb, 1, 0);
    let data = segment(KERNEL_DS, 0x3, 0, 1);
    (sregs.cs, sregs.ss) = (code, data);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs) = (data, data, data, data);
    sregs.gdt =
        kvm_dtable { base: BOOT_GDT, limit: size_of_val(&GDT) as u16 - 1, ..Default::default() };
    // Empty, so that an exception before the guest has loaded its own IDT is a triple fault, which
    // is reported.
    sregs.idt = kvm_dtable::default();
    (sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer) = (CR0, PML4, CR4, EFER);
    fd.set_sregs(&sregs).map_err(KvmError::vcpu(vcpu, "KVM_SET_SREGS"))?;
    let regs = kvm_regs { rip: entry, rdi: u64::from(vcpu), rflags: RFLAGS, ..Default::default() };
    fd.set_regs(&regs).map_err(KvmError::vcpu(vcpu, "KVM_SET_REGS"))?;
    // Otherwise all vCPUs but the first wait for INIT and SIPI, which this machine does not send.
    let runnable = kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE };
    fd.set_mp_state(runnable).map_err(KvmError::vcpu(vcpu, "KVM_SET_MP_STATE"))
}

/// A flat segment of ring 0.
fn segment(selector: u16, type_: u8, l: u8, db: u8) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        s: 1,
        g: 1,
        l,
        db,
        ..Default::default()
    }
}
