//! The guest: its code, its page tables, and their placement.
//!
//! The lab's slot begins at a multiple of 1 GiB above all slots (and above 4 GiB, to stay clear of
//! the interrupt controllers' addresses):
//!
//! | offset | content |
//! | --- | --- |
//! | 0 | code |
//! | 0x1000 | one counter for each vCPU, 64 bytes apart |
//! | 0x2000 | PML4, then the page-directory-pointer tables, then the page directories |
//! | after them | one list of addresses for each vCPU |
//! | at its end | no memory: a write there signals to the host that the work is done |

use std::collections::BTreeSet;

use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};
use vmferry_memory::{GuestMemory, MemoryError, PAGE_SIZE, SlotId, SlotLayout};

use crate::{LabError, MAX_VCPUS};

/// Addresses in a vCPU's list: 256 KiB of them, so that the cost of exits is negligible.
pub(crate) const LIST_ENTRIES: usize = 32 << 10;
const LIST_BYTES: u64 = LIST_ENTRIES as u64 * 8;

const COUNTERS: u64 = 0x1000;
const COUNTER_BYTES: u64 = 64;
const PML4: u64 = 0x2000;
const PDPTS: u64 = 0x3000;
const PAGE: u64 = PAGE_SIZE as u64;
const GIB: u64 = 1 << 30;
/// The lowest address of the lab's slot.
const LOWEST: u64 = 4 * GIB;
/// The lower half of the address space: what 256 entries of a PML4 map.
const MAPPED_END: u64 = 1 << 47;

/// Present, writable, user, accessed: with these bits set the CPU writes nothing into the tables.
const TABLE: u64 = 0x27;
/// The same, plus dirty and 2 MiB large.
const LARGE_PAGE: u64 = 0xe7;

/// Increments `rcx` words from `rdi` on, `rsi` bytes apart, then signals completion.
const RUN: &[u8] = &[
    0x48, 0xff, 0x07, // 0: inc qword [rdi]
    0x48, 0x01, 0xf7, //    add rdi, rsi
    0x48, 0xff, 0xc9, //    dec rcx
    0x75, 0xf5, //          jnz 0
    0x41, 0x88, 0x02, //    mov [r10], al
    0x0f, 0x0b, //          ud2: the host sets RIP before it comes here again
];

/// Increments the words whose `rcx` addresses are listed from `rdi` on, then signals completion.
const LIST: &[u8] = &[
    0x48, 0x8b, 0x07, //       0: mov rax, [rdi]
    0x48, 0xff, 0x00, //          inc qword [rax]
    0x48, 0x83, 0xc7, 0x08, //    add rdi, 8
    0x48, 0xff, 0xc9, //          dec rcx
    0x75, 0xf1, //                jnz 0
    0x41, 0x88, 0x02, //          mov [r10], al
    0x0f, 0x0b, //                ud2
];

/// Increments `rbx` words from `rdx` on, `rsi` bytes apart, forever, and counts in `[r8]`.
const LOOP: &[u8] = &[
    0x48, 0x89, 0xd7, //  0: mov rdi, rdx
    0x48, 0x89, 0xd9, //     mov rcx, rbx
    0x48, 0xff, 0x07, //  6: inc qword [rdi]
    0x49, 0xff, 0x00, //     inc qword [r8]
    0x48, 0x01, 0xf7, //     add rdi, rsi
    0x48, 0xff, 0xc9, //     dec rcx
    0x75, 0xf2, //           jnz 6
    0xeb, 0xea, //           jmp 0
];

/// Offsets of the three routines in the code page.
const RUN_AT: u64 = 0x000;
const LIST_AT: u64 = 0x100;
const LOOP_AT: u64 = 0x200;

/// One entry into the guest, with its arguments; addresses are guest-physical.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Entry {
    Run { address: u64, count: u64, stride: u64 },
    List { list: u64, count: u64 },
    Loop { address: u64, count: u64, stride: u64, counter: u64 },
}

/// The address of the lab's slot, and the ranges that its page tables map.
#[derive(Clone, Debug)]
pub(crate) struct Placement {
    base: u64,
    /// Every GiB that contains a part of a slot or of the lab, ascending.
    gibs: Vec<u64>,
    /// The 512 GiB regions of these.
    pdpts: Vec<u64>,
}

impl Placement {
    pub(crate) fn beyond(layout: &[SlotLayout]) -> Result<Self, LabError> {
        let end = layout.iter().map(|slot| slot.gpa + slot.pages * PAGE).max().unwrap_or(0);
        let base = end.next_multiple_of(GIB).max(LOWEST);
        if base >= MAPPED_END {
            return Err(LabError::TooHigh { end });
        }
        let mut gibs: BTreeSet<u64> = layout
            .iter()
            .flat_map(|slot| slot.gpa / GIB..(slot.gpa + slot.pages * PAGE).div_ceil(GIB))
            .collect();
        gibs.insert(base / GIB);
        let pdpts: BTreeSet<u64> = gibs.iter().map(|gib| gib / 512).collect();
        Ok(Self { base, gibs: gibs.into_iter().collect(), pdpts: pdpts.into_iter().collect() })
    }

    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    /// The lab's slot.
    pub(crate) fn layout(&self) -> [SlotLayout; 1] {
        let pages = (self.end() - self.base) / PAGE;
        [SlotLayout { slot: SlotId(0), gpa: self.base, pages }]
    }

    fn directories(&self) -> u64 {
        self.base + PDPTS + self.pdpts.len() as u64 * PAGE
    }

    pub(crate) fn counter(&self, vcpu: usize) -> u64 {
        self.base + COUNTERS + vcpu as u64 * COUNTER_BYTES
    }

    pub(crate) fn list(&self, vcpu: usize) -> u64 {
        self.directories() + self.gibs.len() as u64 * PAGE + vcpu as u64 * LIST_BYTES
    }

    /// End of the slot, where there is no memory. It is in the same GiB as the slot, so it is
    /// mapped.
    fn end(&self) -> u64 {
        self.list(MAX_VCPUS)
    }

    /// The address at which a write signals that the work is done.
    pub(crate) fn doorbell(&self) -> u64 {
        self.end()
    }

    /// Writes code and page tables.
    pub(crate) fn write(&self, lab: &GuestMemory) -> Result<(), MemoryError> {
        for (at, code) in [(RUN_AT, RUN), (LIST_AT, LIST), (LOOP_AT, LOOP)] {
            lab.write_at(self.base + at, code)?;
        }
        let entry = |table: u64, index: u64, value: u64| {
            lab.write_at(table + index * 8, &value.to_le_bytes())
        };
        for (at, high) in (0..).zip(&self.pdpts) {
            entry(self.base + PML4, *high, (self.base + PDPTS + at * PAGE) | TABLE)?;
        }
        for (at, gib) in (0..).zip(&self.gibs) {
            let directory = self.directories() + at * PAGE;
            let pdpt = self.pdpts.iter().position(|high| *high == gib / 512).unwrap_or_default();
            entry(self.base + PDPTS + pdpt as u64 * PAGE, gib % 512, directory | TABLE)?;
            let pages =
                (0..512_u64).flat_map(|page| (gib * GIB + (page << 21) + LARGE_PAGE).to_le_bytes());
            lab.write_at(directory, &pages.collect::<Vec<u8>>())?;
        }
        Ok(())
    }

    /// The registers for an entry.
    pub(crate) fn registers(&self, entry: Entry) -> kvm_regs {
        // Bit 1 is always set. Interrupts are off, and there is no source of any.
        let start = kvm_regs { rflags: 2, r10: self.doorbell(), ..Default::default() };
        match entry {
            Entry::Run { address, count, stride } => {
                kvm_regs { rip: self.base + RUN_AT, rdi: address, rcx: count, rsi: stride, ..start }
            }
            Entry::List { list, count } => {
                kvm_regs { rip: self.base + LIST_AT, rdi: list, rcx: count, ..start }
            }
            Entry::Loop { address, count, stride, counter } => kvm_regs {
                rip: self.base + LOOP_AT,
                rdx: address,
                rbx: count,
                rsi: stride,
                r8: counter,
                ..start
            },
        }
    }

    /// Puts a vCPU into 64-bit mode at ring 3 on these page tables. The selectors are Linux's,
    /// which a KVM without hardware support (PVM) requires and which others accept. There is no
    /// descriptor table and no interrupt table: nothing loads a segment, and an exception is a
    /// triple fault, which is reported.
    pub(crate) fn set_mode(&self, sregs: &mut kvm_sregs) {
        let code = segment(0x33, 0xb, 1, 0);
        let data = segment(0x2b, 0x3, 0, 1);
        (sregs.cs, sregs.ss) = (code, data);
        (sregs.ds, sregs.es, sregs.fs, sregs.gs) = (data, data, data, data);
        sregs.cr3 = self.base + PML4;
        // PE, MP, ET, NE, WP, AM, PG; PAE, OSFXSR, OSXMMEXCPT; LME, LMA.
        (sregs.cr0, sregs.cr4, sregs.efer) = (0x8005_0033, 0x620, 0x500);
    }
}

/// A flat ring 3 segment.
fn segment(selector: u16, type_: u8, l: u8, db: u8) -> kvm_segment {
    kvm_segment {
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        dpl: 3,
        s: 1,
        g: 1,
        l,
        db,
        ..Default::default()
    }
}
