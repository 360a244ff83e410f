/* Shared by the parts of the balloon driver. The kernel uses balloon.h only. */
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

/* Section 5.5.2. A queue has the same number whether or not the others exist. */
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

/* The context of a step. */
struct balloon {
    const struct guest_view *view;
    struct heap heap;
    volatile struct balloon_report *report;
    struct virtio_device *device;
    uint64_t ticks;
    uint32_t flags; /* words of the command line */
    const volatile uint64_t *interrupts;
    uint64_t interrupts_seen;
    int must_restart; /* set by the hostile driver: the device must be initialized again */
};

/* Whether the device has raised an interrupt since the configuration was last read. */
static inline int balloon_has_news(const struct balloon *balloon)
{
    return *balloon->interrupts != balloon->interrupts_seen;
}

/* ---- balloon_hints.c ---- */

int hints_make(const struct virtio_device *device);
/* Handles a command of the host. */
void hints_command(struct balloon *balloon, uint32_t command);
/* Continues a round of hints. Returns 1 if there is more to do at once. */
int hints_step(struct balloon *balloon);
/* Checks some of the rewritten blocks. */
void rewrites_check(struct balloon *balloon);

/* ---- balloon_lies.c: the same functions of the hostile driver ---- */

int lies_make(const struct virtio_device *device);
void lies_command(struct balloon *balloon, uint32_t command);
int lies_step(struct balloon *balloon);

/* ---- balloon_pages.c ---- */

int pages_make(const struct virtio_device *device);
/* Sets the size of the balloon that the host asks for. */
void pages_target(struct balloon *balloon, uint32_t blocks);
/* Continues to inflate, deflate and report. Returns 1 if there is more to do at once. */
int pages_step(struct balloon *balloon);

#endif
