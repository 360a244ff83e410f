/* What the parts of the driver that lies share (balloon_lies.c). */
#ifndef VMFERRY_BALLOON_LIES_H
#define VMFERRY_BALLOON_LIES_H

#include "balloon_parts.h"

#define LIE_BUFFERS 32u /* of the queue, and descriptors of one story */
#define LIE_UNMAPPINGS 4u
#define HOLE_ADDRESS 0xd0000000ull /* between RAM below 3 GiB and the display */
#define DESCRIPTOR_WRITE 2u

struct liar {
    struct virtqueue queue;
    uint32_t stories; /* told so far */
    uint16_t placed;  /* descriptors of the one in hand */
};

/* Makes the chain that begins there available, whatever it is. */
void lies_offer(struct virtqueue *queue, uint16_t head);
/* Length of the live pages that are hinted at a time, from FIRST_WORK_ADDRESS. */
uint32_t lies_live_bytes(const struct balloon *balloon);

/* ---- balloon_breaks.c: what becomes of the queue after a story ---- */

/* The device must leave the queue alone and say so. */
void lies_break_ring(struct balloon *balloon, struct liar *liar);
/* Takes the queue away, or the device, and goes on as if it were there. */
void lies_take_away(struct balloon *balloon, struct liar *liar);
/* Begins the device with a queue of hints alone, a part of which is nowhere. 0 if it can't be begun. */
int lies_begin_unmapped(struct balloon *balloon, struct liar *liar, uint32_t unmapping);

#endif
