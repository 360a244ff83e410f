/*
 * The driver of a virtio balloon (VIRTIO 1.2, section 5.5), which vCPU 0 of the KVM guest runs at
 * CPL 3 between two steps of its workload.
 *
 * What it gives to the host are free blocks of the heap, whole. It polls its queues, in memory; only
 * changes of the configuration interrupt, and only then, and now and then, are registers read. Its state is in the
 * kernel's data, its rings too; what the VMM can see of it is struct balloon_report.
 *
 * With the word `poison` free pages hold POISON_WORD, and hinted ones still do when the host is done
 * with them, if PAGE_POISON is negotiated: a host that loses them puts it there. Without the feature
 * nothing is expected of them. `reporting`, `pressure` (churn.h), `rewrite` (balloon_hints.c) and `lie`
 * (balloon_lies.c) are further words.
 */
#ifndef VMFERRY_BALLOON_H
#define VMFERRY_BALLOON_H

#include "workload.h"

/*
 * Once, after workload_init: a balloon whose registers are at `address`, 0 for none. `interrupts`
 * counts those of the device.
 */
void balloon_init(const struct guest_view *view, uint64_t address, const volatile uint64_t *interrupts);

/* Some work. Returns 0 to be called again at once, 1 when there is nothing to do until the next tick. */
int balloon_step(const struct guest_view *view, uint64_t ticks);

#endif
