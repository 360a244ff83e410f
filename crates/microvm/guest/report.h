/*
 * Guest memory from 0x8000: what the workload reports, and all the state that it has.
 *
 * The VMM reads these pages (crates/microvm/src/report.rs has the same layout); only the
 * guest writes them. One page for the whole guest, then one for each vCPU.
 */
#ifndef VMFERRY_REPORT_H
#define VMFERRY_REPORT_H

#include <stdint.h>

#define REPORT_ADDRESS 0x8000
#define REPORT_MAGIC 0x5259525245464d56 /* "VMFERRYR" in memory order */
#define REPORT_VERSION 3
#define REPORT_MAX_VCPUS 8

/*
 * What the driver of the balloon says of itself (balloon.h), zero without one. Blocks are of 4 MiB.
 */
#define BALLOON_REPORT_ADDRESS 0x11000
#define BALLOON_REPORT_MAGIC 0x4c59525245464d56 /* "VMFERRYL" in memory order */
#define BALLOON_REPORT_VERSION 2

enum balloon_state {
    BALLOON_ABSENT = 0,
    BALLOON_FAILED = 1,  /* there is a device, and it can't be driven */
    BALLOON_IDLE = 2,
    BALLOON_HINTING = 3, /* blocks are being hinted */
    BALLOON_HOLDING = 4, /* all are, and the host is not done with them */
};

struct balloon_report {
    uint64_t magic;
    uint32_t version;
    uint32_t state;          /* enum balloon_state */
    uint64_t features;       /* negotiated */
    uint64_t interrupts;     /* seen */
    uint64_t unheard;        /* times that the device had news before its interrupt came */
    uint64_t notifications;  /* to the device */
    uint32_t command;        /* the last read: 0 stop, 1 done, or the ID of a round of hints */
    uint32_t rounds;         /* of hints begun */
    uint64_t rounds_ended;   /* in which all free blocks were hinted */
    uint64_t hinted_blocks;  /* in all rounds */
    uint64_t reported_blocks;
    uint32_t held_blocks;    /* hinted and not yet given back */
    uint32_t inflated_blocks;
    uint32_t target_blocks;
    uint32_t deflated_on_demand; /* blocks that the guest took back because it had no others */
    uint64_t statistics;     /* times that they were given */
    uint64_t rewrites;       /* blocks that were written at some stage of the protocol */
    uint64_t rewrite_rounds; /* over all those that are still kept, each checked */
    uint64_t lies;           /* told, and heard by the device (balloon_lies.c) */
};

/* The heartbeat device writes one of these pages after the other. */
#define HEARTBEAT_ADDRESS 0x20000
#define HEARTBEAT_PAGES 16

/*
 * A guest with `display` has two memory slots more, where QEMU's VGA has its frame buffer: the frame
 * buffer, and one of the same size that is written once. The VMM makes them (config.rs).
 */
#define DISPLAY_ADDRESS 0xfd000000ull
#define DISPLAY_PAGES 8
#define STILL_ADDRESS (DISPLAY_ADDRESS + DISPLAY_PAGES * 4096)
#define FRAMES_PER_SECOND 60

enum phase { PHASE_POPULATING = 0, PHASE_RUNNING = 1 };
/* Words of the command line that are on or off. */
enum report_flag {
    FLAG_POISON = 1 << 0,    /* free pages of the heap hold POISON_WORD */
    FLAG_PRESSURE = 1 << 1,  /* hinted blocks are taken back into use all the time */
    FLAG_REPORTING = 1 << 2, /* free blocks are reported to the balloon */
    FLAG_REWRITE = 1 << 3,   /* hinted blocks are written at each stage of the protocol */
    FLAG_ZERO_FREED = 1 << 4, /* with FLAG_POISON: the poison is 0, as with Linux's init_on_free */
};
/* Above the flags: the word `lie`, which says how the driver of the balloon lies (balloon_lies.c). */
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

/* 0x8000: written once, by vCPU 0. */
struct guest_report {
    uint64_t magic;
    uint32_t version;
    uint32_t vcpus;
    uint64_t fill_pages;
    uint64_t read_pages;
    uint64_t hot_pages;
    uint64_t rate;       /* pages per second over all vCPUs, 0 for as fast as can be */
    uint32_t fill_kind;
    uint32_t random;     /* order of the hot pages: 0 sequential, 1 random */
    uint32_t display_pages; /* of the frame buffer, 0 for none */
    uint32_t flags;         /* enum report_flag, and a lie_kind above */
    uint64_t churn_pages;   /* at most, in live buffers of all vCPUs */
    uint64_t churn_rate;    /* pages worked on per second over all vCPUs, 0 for as fast as can be */
    uint64_t freed_pages;   /* written once and freed, before anything else of the heap is used */
};

struct corruption {
    uint64_t gpa;      /* of the page, 0 for none */
    uint64_t expected; /* generation, or the word or heartbeat that should stand there */
    uint64_t found;
    uint64_t round;
};

/* What a rate leaves for later. */
struct rate_credit {
    uint64_t credit; /* thousandths of a page that the rate allows */
    uint64_t credited_ticks;
};

/* 0x9000 + vcpu * 4096 */
struct vcpu_report {
    uint64_t rounds;        /* over all hot pages of this vCPU */
    uint64_t pages_written;
    uint64_t pages_checked;
    uint64_t corruptions;
    struct corruption first;
    uint64_t ticks;         /* of the timer, since the guest began */
    uint64_t last_tsc;
    uint64_t longest_gap_tsc; /* between two steps: the guest's own view of a pause */
    uint64_t phase;         /* running: filled, and each hot page written once */
    uint64_t heartbeats;    /* heartbeat pages found newer than at the last look */
    uint64_t fill_rounds;   /* over all filled pages of this vCPU, each checked */
    uint64_t read_rounds;   /* over all pages of `read` of this vCPU, each checked */
    uint64_t frames;        /* drawn, by vCPU 0 alone; before each both slots were checked whole */
    uint64_t churn_rounds;  /* over all live buffers of this vCPU, each checked */
    uint64_t buffers_allocated;
    uint64_t buffers_freed; /* checked whole before */
    uint64_t churn_work;    /* pages of buffers written or checked: how fast the guest gets on */
    /* The rest is the workload's own. */
    uint64_t fill_next;     /* populated so far, then the page to be verified next */
    uint64_t read_next;     /* the same of `read` */
    uint64_t hot_next;      /* pages visited in this round */
    uint64_t stride;        /* of the round's order; 0 at the start of a round */
    uint64_t offset;
    struct rate_credit hot_credit;
    uint64_t frames_due;    /* at the last frame, from the ticks; those missed are left out */
    uint64_t seen[HEARTBEAT_PAGES];
};

_Static_assert(sizeof(struct guest_report) == 88, "report.rs reads it");
_Static_assert(sizeof(struct balloon_report) == 128, "report.rs reads it");
_Static_assert(sizeof(struct vcpu_report) == 352, "report.rs reads it");

#endif
