/* What the parts of the balloon's driver share. Not for others: balloon.h is what the kernel calls. */
#ifndef VMFERRY_BALLOON_PARTS_H
#define VMFERRY_BALLOON_PARTS_H

#include "heap.h"
#include "virtqueue.h"
#include "work.h"

#define BALLOON_DEVICE 5 /* section 5 */

/* Section 5.5.3. */
#define BALLOON_F_MUST_TELL_HOST (1ull << 0)
#define BALLOON_F_STATS_VQ (1ull << 1)
#define BALLOON_F_DEFLATE_ON_OOM (1ull << 2)
#define BALLOON_F_FREE_PAGE_HINT (1ull << 3)
#define BALLOON_F_PAGE_POISON (1ull << 4)
#define BALLOON_F_PAGE_REPORTING (1ull << 5)

/* Section 5.5.2: numbered so whichever there are. */
enum balloon_queue {
    QUEUE_INFLATE = 0,
    QUEUE_DEFLATE = 1,
    QUEUE_STATISTICS = 2,
    QUEUE_HINTS = 3,
    QUEUE_REPORTS = 4,
};

/* Section 5.5.6.4. */
#define COMMAND_STOP 0u
#define COMMAND_DONE 1u

/* What a step works with. */
struct balloon {
    const struct guest_view *view;
    struct heap heap;
    volatile struct balloon_report *report;
    struct virtio_device *device;
    uint64_t ticks;
    uint32_t flags;     /* words of the command line */
};

/* Whether the configuration has changed since it was last read. */
int balloon_has_news(const struct balloon *balloon);

/* Begins anew with the device, whatever state it is in. */
void balloon_restart(struct balloon *balloon);

/* ---- balloon_hints.c ---- */

int hints_make(const struct virtio_device *device);
/* The host's command has been read. */
void hints_command(struct balloon *balloon, uint32_t command);
/* Goes on with hinting. 1 if there is more to do at once. */
int hints_step(struct balloon *balloon);
/* Checks some of the blocks that were rewritten. */
void rewrites_check(struct balloon *balloon);

/* ---- balloon_lies.c: the same three, of a driver that lies ---- */

int lies_make(const struct virtio_device *device);
void lies_command(struct balloon *balloon, uint32_t command);
int lies_step(struct balloon *balloon);

/* ---- balloon_pages.c ---- */

int pages_make(const struct virtio_device *device);
/* The host wants so many blocks. */
void pages_target(struct balloon *balloon, uint32_t blocks);
/* Goes on with inflating, deflating and reporting. 1 if there is more to do at once. */
int pages_step(struct balloon *balloon);

#endif
