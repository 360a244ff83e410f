/*
 * A driver of virtio-net that talks to one port of one peer, and checks what the device has written
 * into guest memory: when it comes, and once more when the buffer is used again.
 *
 * The word `net=PORT` of the command line turns it on, of a guest that was booted by PVH in a machine
 * with memory-mapped virtio (QEMU's `microvm`).
 */
#ifndef VMFERRY_NETWORK_H
#define VMFERRY_NETWORK_H

#include <stdint.h>

#include "workload.h"

struct network_summary {
    uint64_t replies; /* datagrams that came back as they went */
    uint64_t lost;    /* that did not come back in time */
};

/* Ring 3, vCPU 0; without the word, nothing. */
void network_init(void);
void network_step(const struct guest_view *view, uint64_t ticks);
struct network_summary network_summary(void);

#endif
