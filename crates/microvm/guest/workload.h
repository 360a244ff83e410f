/*
 * The workload of the guest. The same code runs at CPL 3 in the KVM guest and in the threads of the
 * process guest. It has no state outside guest memory.
 *
 * The command line has words separated by spaces: `idle`, `ticks`, `display`, `read=MIB`,
 * `fill=MIB,incompressible|text|zero`, `hot=MIB[,rate=PAGES_PER_S][,random|sequential]`,
 * `freed=MIB`, `churn=MIB[,rate=PAGES_PER_S]`, `poison`, `init-on-free`, `pressure`, `reporting`,
 * `rewrite` and `lie=outside|overlap|used|endless|never|id|chain|unmap`. The VMM has checked them
 * (config.rs). The guest ignores invalid words.
 *
 * `fill` pages are written once and checked from time to time. `read` pages are written once and
 * then checked without pause. `hot` pages are rewritten. `display` has two memory slots: a frame
 * buffer that is redrawn 60 times a second, and a slot of the same size that never changes. The
 * heap (heap.h) has the rest of memory: `freed` writes a part of it once and frees it, and `churn`
 * keeps buffers in it, as a software build does (churn.h).
 */
#ifndef VMFERRY_WORKLOAD_H
#define VMFERRY_WORKLOAD_H

#include <stdint.h>

/* The mappings of guest memory. In the KVM guest the addresses are guest-physical. */
struct guest_view {
    uint64_t low_base;  /* address of guest-physical 0 */
    uint64_t high_base; /* address of guest-physical 4 GiB */
    uint64_t low_bytes;
    uint64_t high_bytes;
    uint64_t display_base; /* address of the frame buffer (report.h), 0 if there is none */
    uint64_t still_base;   /* address of the slot after it, which never changes */
};

/* To be called once, by vCPU 0, before any step. */
void workload_init(const struct guest_view *view, uint32_t vcpus);

/*
 * Does some work of one vCPU, at most about 100 pages. `ticks` counts the ticks of its timer, one
 * per millisecond. Returns 1 if there is nothing to do until the next tick, 0 otherwise.
 */
int workload_step(const struct guest_view *view, uint32_t vcpu, uint64_t ticks);

#endif
