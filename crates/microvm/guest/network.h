/*
 * A virtio-net driver that exchanges datagrams with one port of one peer. It checks the data that
 * the device writes into guest memory twice: on arrival, and before the buffer is used again.
 *
 * The word `net=PORT` of the command line enables it after a PVH boot on a machine with
 * memory-mapped virtio (QEMU's `microvm`).
 */
#ifndef VMFERRY_NETWORK_H
#define VMFERRY_NETWORK_H

#include <stdint.h>

#include "workload.h"

struct network_summary {
    uint64_t replies; /* datagrams that were returned unchanged */
    uint64_t lost;    /* datagrams that were not returned in time */
};

/* In ring 3, on vCPU 0. Without the word these do nothing. */
void network_init(void);
void network_step(const struct guest_view *view, uint64_t ticks);
struct network_summary network_summary(void);

#endif
