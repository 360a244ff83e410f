/*
 * Guest memory from 0x8000 on: the workload's report, and all of its state.
 *
 * The VMM reads these pages (crates/microvm/src/report.rs has the same layout). Only the guest
 * writes them. There is one page for the whole guest, and then one for each vCPU.
 */
#ifndef VMFERRY_REPORT_H
#define VMFERRY_REPORT_H

#include <stdint.h>

#define REPORT_ADDRESS 0x8000
#define REPORT_MAGIC 0x5259525245464d56 /* "VMFERRYR" in memory order */
#define REPORT_VERSION 3
#define REPORT_MAX_VCPUS 8

/*
 * The report of the balloon driver (balloon.h). It is zero without a balloon. A block is 4 MiB.
 */
#define BALLOON_REPORT_ADDRESS 0x11000
#define BALLOON_REPORT_MAGIC 0x4c59525245464d56 /* "VMFERRYL" in memory order */
#define BALLOON_REPORT_VERSION 2

enum balloon_state {
    BALLOON_ABSENT = 0,
    BALLOON_FAILED = 1,  /* the driver cannot drive this device */
    BALLOON_IDLE = 2,
    BALLOON_HINTING = 3, /* hinting blocks */
    BALLOON_HOLDING = 4, /* holding hinted blocks until COMMAND_DONE */
};

struct balloon_report {
    uint64_t magic;
    uint32_t version;
    uint32_t state;          /* enum balloon_state */
    uint64_t features;       /* negotiated */
    uint64_t interrupts;     /* handled */
    uint64_t unheard;        /* times that polling found a change before its interrupt arrived */
    uint64_t notifications;  /* sent to the device */
    uint32_t command;        /* the last one read: 0 STOP, 1 DONE, or the ID of a round of hints */
    uint32_t rounds;         /* rounds of hints begun */
    uint64_t rounds_ended;   /* rounds in which all free blocks were hinted */
    uint64_t hinted_blocks;  /* in all rounds */
    uint64_t reported_blocks;
    uint32_t held_blocks;    /* hinted and not yet returned to the heap */
    uint32_t inflated_blocks;
    uint32_t target_blocks;
    uint32_t deflated_on_demand; /* blocks taken back because the heap was empty */
    uint64_t statistics;     /* times that statistics were sent */
    uint64_t rewrites;       /* blocks that were written at some stage of the protocol */
    uint64_t rewrite_rounds; /* complete checks of the rewritten blocks that are kept */
    uint64_t lies;           /* lies that the device has processed (balloon_lies.c) */
};

/* The heartbeat device writes these pages in turn. */
#define HEARTBEAT_ADDRESS 0x20000
#define HEARTBEAT_PAGES 16

/*
 * A guest with `display` has two more memory slots, at the address of QEMU's VGA frame buffer: the
 * frame buffer, and a slot of the same size that is written only once. The VMM creates them
 * (config.rs).
 */
#define DISPLAY_ADDRESS 0xfd000000ull
#define DISPLAY_PAGES 8
#define STILL_ADDRESS (DISPLAY_ADDRESS + DISPLAY_PAGES * 4096)
#define FRAMES_PER_SECOND 60

enum phase { PHASE_POPULATING = 0, PHASE_RUNNING = 1 };
/* Words of the command line without parameters. */
enum report_flag {
    FLAG_POISON = 1 << 0,    /* free pages of the heap contain POISON_WORD */
    FLAG_PRESSURE = 1 << 1,  /* hinted blocks are often taken back into use */
    FLAG_REPORTING = 1 << 2, /* free blocks are reported to the balloon */
    FLAG_REWRITE = 1 << 3,   /* hinted blocks are written at each stage of the protocol */
    FLAG_ZERO_FREED = 1 << 4, /* with FLAG_POISON: the poison is 0, as with Linux's init_on_free */
};
/* Above the flags: the parameter of the word `lie` of the hostile driver (balloon_lies.c). */
#define LIE_SHIFT 8
#define LIE_OF(flags) ((flags) >> LIE_SHIFT)
enum lie_kind {
    LIE_NONE = 0,
    LIE_OUTSIDE = 1,
    LIE_OVERLAP = 2,
    LIE_USED = 3,
    LIE_ENDLESS = 4,
    LIE_NEVER = 5,
    LIE_ID = 6,
    LIE_CHAIN = 7,
    LIE_UNMAP = 8,
    LIE_COUNT = 9,
};
enum fill_kind { FILL_INCOMPRESSIBLE = 0, FILL_TEXT = 1, FILL_ZERO = 2 };

/* At 0x8000. vCPU 0 writes it once. */
struct guest_report {
    uint64_t magic;
    uint32_t version;
    uint32_t vcpus;
    uint64_t fill_pages;
    uint64_t read_pages;
    uint64_t hot_pages;
    uint64_t rate;       /* pages per second over all vCPUs, 0 for no limit */
    uint32_t fill_kind;
    uint32_t random;     /* order of the hot pages: 0 sequential, 1 random */
    uint32_t display_pages; /* pages of the frame buffer, 0 without a display */
    uint32_t flags;         /* enum report_flag, and a lie_kind above */
    uint64_t churn_pages;   /* maximum pages in live buffers of all vCPUs */
    uint64_t churn_rate;    /* pages worked on per second over all vCPUs, 0 for no limit */
    uint64_t freed_pages;   /* written once and freed, before any other use of the heap */
};

struct corruption {
    uint64_t gpa;      /* of the page, 0 for none */
    uint64_t expected; /* the expected generation, word or heartbeat */
    uint64_t found;
    uint64_t round;
};

/* The unused part of a rate. */
struct rate_credit {
    uint64_t credit; /* thousandths of a page */
    uint64_t credited_ticks;
};

/* At 0x9000 + vcpu * 4096. */
struct vcpu_report {
    uint64_t rounds;        /* over all hot pages of this vCPU */
    uint64_t pages_written;
    uint64_t pages_checked;
    uint64_t corruptions;
    struct corruption first;
    uint64_t ticks;         /* of the timer, since the guest started */
    uint64_t last_tsc;
    uint64_t longest_gap_tsc; /* between two steps: a pause as the guest sees it */
    uint64_t phase;         /* enum phase */
    uint64_t heartbeats;    /* times that a heartbeat page was newer than at the last check */
    uint64_t fill_rounds;   /* complete checks of this vCPU's filled pages */
    uint64_t read_rounds;   /* complete checks of this vCPU's pages of `read` */
    uint64_t frames;        /* drawn by vCPU 0, each after a complete check of both slots */
    uint64_t churn_rounds;  /* complete checks of this vCPU's live buffers */
    uint64_t buffers_allocated;
    uint64_t buffers_freed; /* each after a complete check */
    uint64_t churn_work;    /* pages of buffers written or checked */
    /* The rest is private state of the workload. */
    uint64_t fill_next;     /* while populating: filled pages; later: the next page to check */
    uint64_t read_next;     /* the same for `read` */
    uint64_t hot_next;      /* pages visited in this round */
    uint64_t stride;        /* of the round's order; 0 at the start of a round */
    uint64_t offset;
    struct rate_credit hot_credit;
    uint64_t frames_due;    /* frames due by the ticks at the last frame; missed frames count */
    uint64_t seen[HEARTBEAT_PAGES];
};

_Static_assert(sizeof(struct guest_report) == 88, "report.rs reads it");
_Static_assert(sizeof(struct balloon_report) == 128, "report.rs reads it");
_Static_assert(sizeof(struct vcpu_report) == 352, "report.rs reads it");

#endif
