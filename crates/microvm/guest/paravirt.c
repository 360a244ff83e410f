/* Guest memory that KVM itself writes. See paravirt.h. */
#include "paravirt.h"

#include "machine.h"
#include "work.h"

#define CPUID_SIGNATURE 0x40000000u /* "KVMKVMKVM" */
#define CPUID_FEATURES 0x40000001u
#define MSR_TSC 0x10
#define MSR_CLOCK 0x4b564d01
#define MSR_STEAL 0x4b564d03
#define MSR_EOI 0x4b564d04
#define ENABLED 1

#define STEP_TICKS 16  /* between two checks of the clock, each of which costs two faults */
#define EOI_LOOKS 32   /* in a step */
#define RENEW_TICKS 50 /* between two requests to KVM to write all clocks */

struct clock_page {
    uint32_t version, reserved; /* odd while KVM writes the page */
    uint64_t tsc, system_time;  /* nanoseconds at that TSC */
    uint32_t multiplier;
    int8_t shift;
    uint8_t flags, reserved1[2];
};
_Static_assert(sizeof(struct clock_page) == 32, "struct pvclock_vcpu_time_info");

struct steal_page {
    uint64_t steal; /* nanoseconds */
    uint32_t version, flags;
    uint8_t preempted, reserved[47];
};
_Static_assert(sizeof(struct steal_page) == 64, "struct kvm_steal_time");

/* On separate pages, which only KVM writes. */
static union {
    struct clock_page clock;
    uint8_t bytes[PAGE_BYTES];
} clocks[MAX_VCPUS] __attribute__((aligned(4096)));
static union {
    struct steal_page steal;
    uint8_t bytes[PAGE_BYTES];
} steals[MAX_VCPUS] __attribute__((aligned(4096)));

/* The values that a vCPU has seen last. */
struct seen {
    uint64_t ticks, renewed;
    uint32_t clock_version, steal_version;
    uint64_t system_time, now, steal;
    uint64_t clock_updates, steal_updates;
    uint64_t eois_offered; /* of the next vCPU */
};
static struct seen seen[MAX_VCPUS];
static uint32_t features;

void paravirt_find(void)
{
    uint32_t eax = CPUID_SIGNATURE, ebx, ecx = 0, edx;

    __asm__ volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
    if (ebx != 0x4b4d564b || ecx != 0x564b4d56 || edx != 0x4d)
        return;
    eax = CPUID_FEATURES;
    __asm__ volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
    features = eax & (PARAVIRT_CLOCK | PARAVIRT_STEAL | PARAVIRT_EOI);
}

void paravirt_enable(uint32_t vcpu)
{
    if (features & PARAVIRT_CLOCK)
        write_msr(MSR_CLOCK, (uint64_t)&clocks[vcpu] | ENABLED);
    if (features & PARAVIRT_STEAL)
        write_msr(MSR_STEAL, (uint64_t)&steals[vcpu] | ENABLED);
    if (features & PARAVIRT_EOI)
        write_msr(MSR_EOI, (uint64_t)(cpu_pages[vcpu] + CPU_EOI) | ENABLED);
}

/* ---- ring 3 ---- */

/* Checks a value that must not decrease. */
static void must_not_fall(volatile struct vcpu_report *report, const volatile void *page,
                          uint64_t before, uint64_t now)
{
    if (now < before)
        report_corruption(report, (uint64_t)page, before, now);
}

/* The current time of the clock, or 0 while KVM writes it. */
static uint64_t clock_time(const volatile struct clock_page *clock)
{
    uint32_t version = __atomic_load_n(&clock->version, __ATOMIC_ACQUIRE);
    uint64_t passed = read_msr(MSR_TSC) - clock->tsc;

    passed = clock->shift < 0 ? passed >> -clock->shift : passed << clock->shift;
    uint64_t now =
        clock->system_time + (uint64_t)((unsigned __int128)passed * clock->multiplier >> 32);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return version & 1 || version != clock->version ? 0 : now;
}

static void check_clock(volatile struct vcpu_report *report, uint32_t vcpu)
{
    const volatile struct clock_page *clock = &clocks[vcpu].clock;
    struct seen *last = &seen[vcpu];
    uint32_t version = __atomic_load_n(&clock->version, __ATOMIC_ACQUIRE);
    uint64_t system_time = clock->system_time;

    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (version & 1 || version != clock->version)
        return;
    must_not_fall(report, clock, last->clock_version, version);
    must_not_fall(report, clock, last->system_time, system_time);
    last->clock_updates += version != last->clock_version;
    last->clock_version = version;
    last->system_time = system_time;
    uint64_t now = clock_time(clock);
    if (!now)
        return;
    /* The clock runs, so its time must have increased. */
    must_not_fall(report, clock, last->now + 1, now);
    last->now = now;
}

static void check_steal(volatile struct vcpu_report *report, uint32_t vcpu)
{
    const volatile struct steal_page *page = &steals[vcpu].steal;
    struct seen *last = &seen[vcpu];
    uint32_t version = __atomic_load_n(&page->version, __ATOMIC_ACQUIRE);
    uint64_t steal = page->steal;

    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (version & 1 || version != page->version)
        return;
    must_not_fall(report, page, last->steal_version, version);
    must_not_fall(report, page, last->steal, steal);
    last->steal_updates += version != last->steal_version;
    last->steal_version = version;
    last->steal = steal;
}

/*
 * Counts how often KVM has set the EOI flag of another vCPU. KVM clears it when that vCPU leaves
 * the guest. So where ring 0 is emulated (PVM), the vCPU cannot use it, and only other vCPUs see
 * it.
 */
static void watch_eoi(uint32_t vcpu, uint32_t vcpus)
{
    volatile uint32_t *word = (volatile uint32_t *)(cpu_pages[(vcpu + 1) % vcpus] + CPU_EOI);

    for (unsigned look = 0; look < EOI_LOOKS; look++)
        seen[vcpu].eois_offered += *word & 1;
}

void paravirt_step(const struct guest_view *view, uint32_t vcpu, uint64_t ticks)
{
    volatile struct vcpu_report *report = vcpu_report(view, vcpu);
    struct seen *last = &seen[vcpu];
    uint32_t vcpus = guest_report(view)->vcpus;

    if (features & PARAVIRT_EOI && vcpu < vcpus && vcpus > 1)
        watch_eoi(vcpu, vcpus);

    if (!features || ticks < last->ticks + STEP_TICKS)
        return;
    last->ticks = ticks;
    if (features & PARAVIRT_CLOCK)
        check_clock(report, vcpu);
    if (features & PARAVIRT_STEAL)
        check_steal(report, vcpu);
    /* This makes KVM write the clocks of all vCPUs, so they are also written during a migration. */
    if (features & PARAVIRT_CLOCK && vcpu == 0 && ticks >= last->renewed + RENEW_TICKS) {
        last->renewed = ticks;
        write_msr(MSR_CLOCK, (uint64_t)&clocks[vcpu] | ENABLED);
    }
}

uint32_t paravirt_steal_version(uint32_t vcpu)
{
    return __atomic_load_n(&steals[vcpu].steal.version, __ATOMIC_ACQUIRE);
}

void paravirt_must_differ(const struct guest_view *view, uint32_t vcpu, uint32_t version)
{
    if (features & PARAVIRT_STEAL && paravirt_steal_version(vcpu) == version)
        report_corruption(vcpu_report(view, vcpu), (uint64_t)&steals[vcpu], version + 2ull,
                          version);
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

struct paravirt_summary paravirt_summary(uint32_t vcpus)
{
    struct paravirt_summary all = {.features = features,
                                   .clock_page = (uint64_t)clocks,
                                   .steal_page = (uint64_t)steals,
                                   .clock_updates = ~0ull,
                                   .clock_us = ~0ull,
                                   .steal_updates = ~0ull,
                                   .eois_saved = ~0ull};

    for (uint32_t vcpu = 0; vcpu < vcpus; vcpu++) {
        all.clock_updates = least(all.clock_updates, seen[vcpu].clock_updates);
        all.clock_us = least(all.clock_us, seen[vcpu].now / 1000);
        all.steal_updates = least(all.steal_updates, seen[vcpu].steal_updates);
        all.eois_offered += seen[vcpu].eois_offered;
        all.steal_us += seen[vcpu].steal / 1000;
        all.eois_saved =
            least(all.eois_saved, *(volatile uint64_t *)(cpu_pages[vcpu] + CPU_EOIS_SAVED));
    }
    return all;
}
