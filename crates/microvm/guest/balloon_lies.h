/* Shared by the parts of the hostile driver (balloon_lies.c). */
#ifndef VMFERRY_BALLOON_LIES_H
#define VMFERRY_BALLOON_LIES_H

#include "balloon_parts.h"

#define LIE_BUFFERS 32u /* descriptors of the queue, and maximum descriptors of one story */
#define LIE_UNMAPPINGS 4u
#define MIB_BYTES (1ull << 20)
#define HOLE_ADDRESS 0xd0000000ull /* between RAM below 3 GiB and the display */
#define DESCRIPTOR_WRITE 2u

struct liar {
    struct virtqueue queue;
    uint32_t stories; /* begun so far */
    uint16_t placed;  /* descriptors of the current story */
};

/* Makes a descriptor chain available, without checking it. */
static inline void lies_offer(struct virtqueue *queue, uint16_t head)
{
    queue->available[2 + queue->added % queue->size] = head;
    queue->added++;
    __atomic_store_n(&queue->available[1], queue->added, __ATOMIC_RELEASE);
}

/* Number of the live pages, from FIRST_WORK_ADDRESS on. */
static inline uint64_t lies_live_pages(const struct balloon *balloon)
{
    uint64_t fill = guest_report(balloon->view)->fill_pages, low = low_work_pages(balloon->view);
    return fill < low ? fill : low;
}

/* Size of the live range that is hinted at a time, from FIRST_WORK_ADDRESS on. */
static inline uint32_t lies_live_bytes(const struct balloon *balloon)
{
    uint64_t bytes = lies_live_pages(balloon) * PAGE_BYTES;
    return (uint32_t)(bytes < MIB_BYTES ? bytes : MIB_BYTES);
}

/* ---- balloon_breaks.c: breaks the queue after a story ---- */

/* Makes the ring invalid. The device must stop using the queue and ask for a reset. */
void lies_break_ring(struct balloon *balloon, struct liar *liar);
/* Disables the queue, or resets the device, and then uses the queue as before. */
void lies_take_away(struct balloon *balloon, struct liar *liar);
/*
 * Starts the device with only a queue of hints, a part of which is outside memory. Returns 0 if the
 * device cannot be started.
 */
int lies_begin_unmapped(struct balloon *balloon, struct liar *liar, uint32_t unmapping);

#endif
