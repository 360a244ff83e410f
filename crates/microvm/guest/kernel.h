/*
 * Constants that start.S, kernel.c and the VMM share. Only plain #defines, because the assembler
 * reads this file, too.
 *
 * Guest-physical map below 16 MiB, identity-mapped (see also crates/microvm/src/kvm/boot.rs):
 *   0x5000            start-up code of secondary vCPUs (PVH boot only)
 *   0x6000            struct boot_parameters
 *   0x7000            command line, NUL-terminated
 *   0x8000..0x12000   report and workload state (report.h)
 *   0x20000..0x30000  heartbeat ring
 *   0x40000           PML4, 0x41000 PDPT, 0x42000 boot GDT of the VMM
 *   0x100000          this ELF
 *   0x200000..        page directories, one page per GiB mapped
 *   0x400000..        the heap's own memory (heap.h)
 * and, with the workload `display`, two slots at 0xfd000000 (report.h).
 */
#ifndef VMFERRY_KERNEL_H
#define VMFERRY_KERNEL_H

#define TRAMPOLINE_ADDRESS 0x5000
#define BOOT_PARAMETERS_ADDRESS 0x6000
#define COMMAND_LINE_ADDRESS 0x7000
#define COMMAND_LINE_BYTES 4096
#define PML4_ADDRESS 0x40000
#define PDPT_ADDRESS 0x41000
#define PAGE_DIRECTORIES_ADDRESS 0x200000

#define BOOT_MAGIC 0x4259525245464d56 /* "VMFERRYB" in memory order */
#define BOOT_VERSION 3
#define MAX_VCPUS 8

/* The selectors of Linux: PVM runs ring 3 natively only with these. */
#define KERNEL_CS32 0x08
#define KERNEL_CS 0x10
#define KERNEL_DS 0x18
#define USER_DS 0x2b
#define USER_CS 0x33
#define FIRST_TSS 0x40
#define GDT_ENTRIES (8 + 2 * MAX_VCPUS)

/* Each vCPU has one page, with its counters at the start and its ring 0 stack above them. */
#define CPU_PAGE_BYTES 4096
#define CPU_TICKS 0
#define CPU_INTERRUPTS 8 /* of the balloon, on vCPU 0 */
#define CPU_EOI 16       /* bit 0: KVM needs no write to the EOI register (paravirt.h) */
#define CPU_EOIS_SAVED 24
/* Milliseconds between timer interrupts after a PVH boot, where each costs several exits. */
#define PVH_TICKS 4
#define USER_STACK_BYTES 16384

#define VECTOR_TIMER 0x30
#define VECTOR_BALLOON 0x31
#define VECTOR_SPURIOUS 0x3f
#define IDT_ENTRIES 64

#define LAPIC_BASE 0xfee00000
#define LAPIC_EOI 0x0b0

#define IOAPIC_BASE 0xfec00000
#define BALLOON_PIN 16 /* edge-triggered */

/* The pvpanic device: bit 0 means that the guest panicked. */
#define PVPANIC_PORT 0x505
#define PVPANIC_PANICKED 1

#endif
