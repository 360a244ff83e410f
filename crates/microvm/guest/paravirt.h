/*
 * Guest memory that KVM itself writes: a clock, the time that the host has stolen, and whether the end
 * of an interrupt need not be told to the LAPIC. A guest that a VMM of KVM has booted by PVH turns on
 * what the processor says that there is, and checks that it goes on and never back. Such writes come from
 * the host's kernel, so a dirty log that sees vCPUs only would lose them.
 *
 * Layout and registers: Linux, Documentation/virt/kvm/x86/msr.rst and cpuid.rst.
 */
#ifndef VMFERRY_PARAVIRT_H
#define VMFERRY_PARAVIRT_H

#include <stdint.h>

#include "workload.h"

/* Bits of CPUID leaf 0x40000001, EAX. */
#define PARAVIRT_CLOCK (1u << 3)
#define PARAVIRT_STEAL (1u << 5)
#define PARAVIRT_EOI (1u << 6)

/* What the guest has seen of it; of all vCPUs, the one with the least. */
struct paravirt_summary {
    uint32_t features;      /* turned on */
    uint64_t clock_page, steal_page; /* of vCPU 0 */
    uint64_t clock_updates; /* times that KVM was seen to have written the clock */
    uint64_t clock_us;      /* its time */
    uint64_t steal_updates;
    uint64_t steal_us;
    uint64_t eois_saved;   /* the LAPIC was not told */
    uint64_t eois_offered; /* seen by other vCPUs */
};

/* Ring 0, once: which of them there are. Without a call there are none. */
void paravirt_find(void);
/* Ring 0, each vCPU. */
void paravirt_enable(uint32_t vcpu);

/* Ring 3, each vCPU: looks at what KVM has written, once in a tick. */
void paravirt_step(const struct guest_view *view, uint32_t vcpu, uint64_t ticks);
/* Between two of these, vCPU 0 has left the guest: KVM must have noted what was stolen meanwhile. */
uint32_t paravirt_steal_version(uint32_t vcpu);
void paravirt_must_differ(const struct guest_view *view, uint32_t vcpu, uint32_t version);

struct paravirt_summary paravirt_summary(uint32_t vcpus);

#endif
