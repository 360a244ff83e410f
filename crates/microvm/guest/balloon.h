/*
 * The driver of a virtio balloon (VIRTIO 1.2, section 5.5). vCPU 0 of the KVM guest runs it at
 * CPL 3 between two steps of the workload.
 *
 * The driver gives whole free blocks of the heap to the host. It polls its queues in memory. Only a
 * change of the configuration raises an interrupt. The driver reads registers after an interrupt,
 * and from time to time without one. Its state and its rings are in the kernel's data. The VMM sees
 * only struct balloon_report.
 *
 * With the word `poison`, free pages contain POISON_WORD. If PAGE_POISON is negotiated, hinted
 * pages must still contain it after COMMAND_DONE: a host that drops their content restores the
 * poison. Without the feature the driver expects nothing of their content. Further words of the
 * driver are `reporting`, `pressure` (churn.h), `rewrite` (balloon_hints.c) and `lie`
 * (balloon_lies.c).
 */
#ifndef VMFERRY_BALLOON_H
#define VMFERRY_BALLOON_H

#include "workload.h"

/*
 * To be called once, after workload_init. `address` is that of the device's registers, or 0 if
 * there is no balloon. `interrupts` counts the device's interrupts.
 */
void balloon_init(const struct guest_view *view, uint64_t address,
                  const volatile uint64_t *interrupts);

/* Does some work. Returns 1 if there is nothing to do until the next tick, 0 otherwise. */
int balloon_step(const struct guest_view *view, uint64_t ticks);

#endif
