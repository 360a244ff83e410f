/*
 * What the guest does with its memory: the same code at CPL 3 of the KVM guest and in the threads
 * of the process guest. It has no state outside guest memory.
 *
 * Command line: words separated by spaces, of `idle`, `ticks`, `display`, `read=MIB`,
 * `fill=MIB,incompressible|text|zero`, `hot=MIB[,rate=PAGES_PER_S][,random|sequential]`, `freed=MIB`,
 * `churn=MIB[,rate=PAGES_PER_S]`, `poison`, `init-on-free`, `pressure`, `reporting`,
 * `rewrite` and `lie=outside|overlap|used|endless|never|id|chain|unmap`. The VMM has checked it (config.rs); what makes no
 * sense here is ignored.
 *
 * `fill` is written once and checked in passing; `read` is written once and then checked without
 * pause; `hot` is rewritten; `display` is a frame buffer that is redrawn 60 times a second, and as
 * much that never changes, each in a memory slot of its own. What these leave is the heap's (heap.h):
 * `freed` of it is written once and freed; `churn` keeps buffers in it, as a build does (churn.h).
 */
#ifndef VMFERRY_WORKLOAD_H
#define VMFERRY_WORKLOAD_H

#include <stdint.h>

/* Where guest memory is mapped: in the KVM guest, the addresses are the guest-physical ones. */
struct guest_view {
    uint64_t low_base;  /* of guest-physical 0 */
    uint64_t high_base; /* of guest-physical 4 GiB */
    uint64_t low_bytes;
    uint64_t high_bytes;
    uint64_t display_base; /* of the frame buffer (report.h), 0 if there is none */
    uint64_t still_base;   /* of the slot beside it, which never changes */
};

/* Once, by vCPU 0, before any step. */
void workload_init(const struct guest_view *view, uint32_t vcpus);

/*
 * Some work of one vCPU, bounded to about 100 pages. `ticks` counts its timer's ticks, one per
 * millisecond. Returns 0 to be called again at once, 1 when there is nothing to do until the next
 * tick.
 */
int workload_step(const struct guest_view *view, uint32_t vcpu, uint64_t ticks);

#endif
