/*
 * The workloads of the heap.
 *
 * `freed`: a part of the heap is written once and freed, as by programs that have ended.
 *
 * `churn`: each vCPU has buffers of 1 to 256 pages, as a software build does. It allocates and
 * frees buffers so that they take between 70 % and all of its share. It writes each new buffer
 * completely, checks one buffer after the other, rewrites parts of some, and checks each buffer
 * again before it frees it, mostly in the order of allocation. A page contains the generation of
 * its buffer, and words that are computed from the generation and the page's address. No generation
 * is used twice, so stale pages are detected.
 *
 * A vCPU always works on one job (enum churn_job). A step continues that job for a while.
 */
#ifndef VMFERRY_CHURN_H
#define VMFERRY_CHURN_H

#include "report.h"
#include "workload.h"

#define CHURN_ADDRESS 0x410000ull /* struct churn_state, a page for each vCPU */
#define CHURN_BUFFERS_ADDRESS 0x600000ull
#define CHURN_BUFFERS 16384u /* per vCPU */
#define PRESSURE_TICKS 20
#define PRESSURE_BLOCKS 2 /* taken by each vCPU each time */

enum churn_job {
    JOB_NONE = 0,
    JOB_WRITE = 1,   /* writes a new buffer */
    JOB_CHECK = 2,   /* checks a buffer */
    JOB_REWRITE = 3, /* rewrites a part of a buffer, from the end of its last rewrite on */
    JOB_RELEASE = 4, /* checks a buffer, poisons it if poison is on, then frees it */
};

struct churn_buffer {
    uint32_t page;      /* number of its first page */
    uint16_t pages;     /* 0: no buffer */
    uint16_t rewritten; /* number of its first pages that are of the next generation */
    uint64_t generation;
};

struct churn_state {
    uint64_t random;
    uint64_t buffers_made; /* so far; the generation of a buffer follows from it */
    uint64_t live_pages;
    struct rate_credit credit;
    uint64_t pressed_ticks; /* time of the last pressure */
    uint32_t slots;         /* number of slots that have ever been used */
    uint32_t lowest;        /* no slot below this one is empty */
    uint32_t cursor;        /* the next slot to check in this round */
    uint32_t shrinking;     /* 1: the live size decreases */
    uint32_t job;           /* enum churn_job */
    uint32_t slot;          /* the job's buffer */
    uint32_t next, end;     /* the job's pages */
    uint32_t poisoned;      /* number of a new buffer's first pages that must contain poison */
    uint32_t pressed;       /* 1: the next job is a new buffer in the block that was taken last */
    uint64_t freed_blocks;  /* blocks of `freed` that were written and freed */
    uint32_t freed_block;   /* the current block of `freed` + 1 */
    uint32_t freed_next;    /* its next page; from HEAP_BLOCK_PAGES on, pages to be poisoned */
};

_Static_assert(sizeof(struct churn_buffer) == 16, "256 KiB for each vCPU");
_Static_assert(sizeof(struct churn_state) == 104, "no holes");

/* To be called once, by vCPU 0, after heap_init. */
void churn_init(const struct guest_view *view);
/* Populates a part of the heap's workloads. Returns 0 when they are populated. */
int churn_populate(const struct guest_view *view, uint32_t vcpu);
/* Does some work. Returns 1 if there is more to do at once. */
int churn_step(const struct guest_view *view, uint32_t vcpu, uint64_t ticks);

#endif
