/*
 * The machine as ring 0 of the bare-metal guest sees it: the boot parameters from the VMM or the
 * PVH boot, and access to ports, model-specific registers and the LAPIC.
 */
#ifndef VMFERRY_MACHINE_H
#define VMFERRY_MACHINE_H

#include <stdint.h>

#include "kernel.h"

struct boot_parameters {
    uint64_t magic;
    uint32_t version;
    uint32_t vcpus;
    uint64_t low_bytes;  /* RAM from 0, at most 3 GiB */
    uint64_t high_bytes; /* RAM from 4 GiB */
    uint64_t has_display; /* 1 if the slots from DISPLAY_ADDRESS exist */
    uint64_t balloon_address; /* registers of a virtio-mmio balloon; 0 if there is none */
};
_Static_assert(sizeof(struct boot_parameters) == 48, "the VMM writes it");

extern uint32_t booted_by_pvh; /* 1 after a PVH boot (pvh.c) */
extern uint8_t cpu_pages[MAX_VCPUS][CPU_PAGE_BYTES];

static inline void out8(uint16_t port, uint8_t value)
{
    __asm__ volatile("outb %0, %1" : : "a"(value), "Nd"(port));
}

static inline void lapic_write(uint32_t offset, uint32_t value)
{
    *(volatile uint32_t *)(uintptr_t)(LAPIC_BASE + offset) = value;
}

static inline volatile struct boot_parameters *boot_parameters(void)
{
    uintptr_t address = BOOT_PARAMETERS_ADDRESS;
    __asm__("" : "+r"(address)); /* not a constant: GCC takes low constants for null pointers */
    return (volatile struct boot_parameters *)address;
}

static inline uint8_t in8(uint16_t port)
{
    uint8_t value;
    __asm__ volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}

/* In ring 3 these three fault, and ring 0 then executes them with the same registers (start.S). */
static inline void write_msr(uint32_t msr, uint64_t value)
{
    __asm__ volatile("wrmsr"
                     :
                     : "c"(msr), "a"((uint32_t)value), "d"((uint32_t)(value >> 32))
                     : "memory");
}

static inline uint64_t read_msr(uint32_t msr)
{
    uint32_t low, high;
    __asm__ volatile("rdmsr" : "=a"(low), "=d"(high) : "c"(msr) : "memory");
    return (uint64_t)high << 32 | low;
}

static inline void out8_string(uint16_t port, const void *from, uint64_t bytes)
{
    __asm__ volatile("rep outsb" : "+S"(from), "+c"(bytes) : "d"(port) : "memory");
}

#endif
