/*
 * The workloads of the heap.
 *
 * `freed`: so much of it is written once and freed, as by programs that have ended.
 *
 * `churn`: as a build does, each vCPU keeps buffers of 1 to 256 pages: it allocates and frees some
 * so that they take between 70 % and all of its share, writes each whole when it is new, computes on
 * them (checks them whole, one after the other, rewrites parts of some), and checks each once more
 * before it is freed, most of them in the order in which they came. A page holds its buffer's generation and words that follow from it and from the
 * page's address; no generation comes twice, so a page of an earlier time is found, too.
 *
 * A vCPU is always at some place of one job (enum churn_job); a step goes on with it for a while.
 */
#ifndef VMFERRY_CHURN_H
#define VMFERRY_CHURN_H

#include "report.h"
#include "workload.h"

#define CHURN_ADDRESS 0x410000ull /* struct churn_state, a page for each vCPU */
#define CHURN_BUFFERS_ADDRESS 0x600000ull
#define CHURN_BUFFERS 16384u /* of each vCPU */
#define PRESSURE_TICKS 20
#define PRESSURE_BLOCKS 2 /* taken by each vCPU each time */

enum churn_job {
    JOB_NONE = 0,
    JOB_WRITE = 1,   /* a new buffer, whole */
    JOB_CHECK = 2,   /* a buffer, whole */
    JOB_REWRITE = 3, /* a part of a buffer, from where the last rewrite ended */
    JOB_RELEASE = 4, /* checks a buffer whole (and poisons it), then frees it */
};

struct churn_buffer {
    uint32_t page;      /* number of its first page */
    uint16_t pages;     /* 0: there is none */
    uint16_t rewritten; /* so many of its first pages are of the next generation */
    uint64_t generation;
};

struct churn_state {
    uint64_t random;
    uint64_t buffers_made; /* each has a generation of its own */
    uint64_t live_pages;
    struct rate_credit credit;
    uint64_t pressed_ticks; /* of the last pressure */
    uint32_t slots;         /* places that have had a buffer: those from here on never had */
    uint32_t lowest;        /* no place below is empty */
    uint32_t cursor;        /* the place to be checked next in this round */
    uint32_t shrinking;     /* 1: the live size goes down */
    uint32_t job;           /* enum churn_job */
    uint32_t slot;          /* its buffer */
    uint32_t next, end;     /* its pages */
    uint32_t poisoned;      /* so many of a new buffer's pages must still hold poison */
    uint32_t pressed;       /* 1: a new buffer comes next, in the block that was taken last, whatever the live size is */
    uint64_t freed_blocks;  /* of `freed`, written and freed so far */
    uint32_t freed_block;   /* the one in hand + 1 */
    uint32_t freed_next;    /* its next page; from HEAP_BLOCK_PAGES on, those to be poisoned */
};

_Static_assert(sizeof(struct churn_buffer) == 16, "256 KiB for each vCPU");
_Static_assert(sizeof(struct churn_state) == 104, "no holes");

/* Once, by vCPU 0, after heap_init. */
void churn_init(const struct guest_view *view);
/* Some of what must be there before the guest is of its full size. 0 when all of it is. */
int churn_populate(const struct guest_view *view, uint32_t vcpu);
/* Some work. 1 if there is more to do at once. */
int churn_step(const struct guest_view *view, uint32_t vcpu, uint64_t ticks);

#endif
