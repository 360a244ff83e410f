/*
 * Guest memory that KVM itself writes: the kvmclock, the steal time, and the paravirtual EOI flag.
 * After a PVH boot on KVM the guest enables those that CPUID reports, and checks that their values
 * increase. These writes come from the host's kernel, so a dirty log that sees only the writes of
 * vCPUs would miss them.
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

/* The observed writes. Updates and the clock are the minimum over all vCPUs. */
struct paravirt_summary {
    uint32_t features;      /* enabled */
    uint64_t clock_page, steal_page; /* of vCPU 0 */
    uint64_t clock_updates; /* observed updates of the clock */
    uint64_t clock_us;      /* the clock's time */
    uint64_t steal_updates;
    uint64_t steal_us;
    uint64_t eois_saved;   /* interrupts without a write to the EOI register */
    uint64_t eois_offered; /* times that another vCPU saw the EOI flag set */
};

/* In ring 0, once: finds the available features. Without this call none is used. */
void paravirt_find(void);
/* In ring 0, on each vCPU. */
void paravirt_enable(uint32_t vcpu);

/* In ring 3, on each vCPU: checks the values that KVM has written. */
void paravirt_step(const struct guest_view *view, uint32_t vcpu, uint64_t ticks);
/*
 * If vCPU 0 has left the guest between these two calls, KVM must have updated the steal time. The
 * second call reports a corruption if it has not.
 */
uint32_t paravirt_steal_version(uint32_t vcpu);
void paravirt_must_differ(const struct guest_view *view, uint32_t vcpu, uint32_t version);

struct paravirt_summary paravirt_summary(uint32_t vcpus);

#endif
