/*
 * The guest's allocator: what the workloads with fixed pages leave of its memory, in blocks of 4 MiB.
 *
 * All that it knows is in guest memory at fixed addresses, so that it migrates and the VMM can read
 * which pages are free (crates/microvm/src/account.rs has the same layout):
 *   0x400000              struct heap_header
 *   0x410000..0x418000    what each vCPU does with it (churn.h), a page each
 *   0x480000..0x580000    struct heap_block, one for each block
 *   0x600000..0x800000    the live buffers of each vCPU (churn.h), 256 KiB each
 *   0x800000..0x1000000   a bitmap for each block: which of its pages are allocated
 * What a guest does not use of these stays as the machine made it, zero: a block that never left the
 * heap has no state yet, and one that was never split no bitmap.
 *
 * Blocks on a list of all vCPUs change hands under a lock. A split block is one vCPU's own, which
 * allocates runs of its pages without; when the last is freed the block goes back to all.
 *
 * This memory may have come from another host, damaged. What is read from it is checked before it is
 * used as an address, and what does not fit is reported as a corruption.
 */
#ifndef VMFERRY_HEAP_H
#define VMFERRY_HEAP_H

#include "report.h"
#include "workload.h"

#define HEAP_ADDRESS 0x400000ull
#define HEAP_BLOCKS_ADDRESS 0x480000ull
#define HEAP_BITMAPS_ADDRESS 0x800000ull
#define HEAP_MAGIC 0x4859525245464d56 /* "VMFERRYH" in memory order */
#define HEAP_VERSION 1
#define HEAP_BLOCK_BYTES (4ull << 20)
#define HEAP_BLOCK_PAGES 1024u
#define HEAP_BITMAP_WORDS (HEAP_BLOCK_PAGES / 64)
#define HEAP_MAX_BLOCKS 65536u /* 256 GiB */

#define POISON_WORD 0xaaaaaaaaaaaaaaaaull /* what Linux's page_poisoning writes; its init_on_free writes 0 */

/* Who has a block; the VMM counts all but BLOCK_WHOLE, and of BLOCK_SPLIT what its bitmap says, as free. */
enum block_state {
    BLOCK_FREE = 0,
    BLOCK_WHOLE = 1,     /* allocated whole */
    BLOCK_SPLIT = 2,     /* pages of it are allocated, by one vCPU */
    BLOCK_HINTED = 3,    /* the balloon driver has told the host that it is free, and holds it */
    BLOCK_INFLATED = 4,  /* in the balloon */
    BLOCK_REPORTING = 5, /* being reported as free: not to be used until the host has seen it */
};

/* The list on which a block is. */
enum block_list {
    LIST_NONE = 0,      /* allocated whole, or never out of the heap */
    LIST_USED = 1,      /* free, and has been written: the host has memory for it */
    LIST_FRESH = 2,     /* free, and costs the host nothing */
    LIST_HELD = 3,      /* hinted */
    LIST_INFLATED = 4,
    LIST_DEFLATING = 5, /* out of the balloon as soon as the device says so */
    LIST_REPORTING = 6,
    LIST_SPLIT = 8,     /* and one for each vCPU */
    LIST_COUNT = LIST_SPLIT + REPORT_MAX_VCPUS,
};

/* Where to take a block from: a set of these, tried in this order. */
enum heap_source {
    FROM_USED = 1 << 0,
    FROM_FRESH = 1 << 1, /* and those that never left the heap */
    FROM_HELD = 1 << 2,
    FROM_INFLATED = 1 << 3,
    FROM_DEFLATING = 1 << 4,
    FROM_REPORTING = 1 << 5,
};

struct heap_block {
    uint8_t state;
    uint8_t list;
    uint8_t used;       /* 1: has been written since the host last had it back */
    uint8_t reserved;
    uint16_t touched;   /* with poison: pages below it hold poison if they are free, no others do */
    uint16_t run_limit; /* of a split block: there is no longer run of free pages than this */
    uint32_t next;      /* on its list: number of the block + 1, 0 at the ends */
    uint32_t previous;
};

struct block_list_head {
    uint32_t head; /* number of the block + 1 */
    uint32_t count;
};

struct heap_header {
    uint64_t magic;
    uint32_t version;
    uint32_t block_bytes;
    uint32_t blocks;
    uint32_t low_blocks; /* of them, below 4 GiB */
    uint64_t low_first;  /* guest-physical address of block 0 */
    uint64_t high_first; /* of block `low_blocks` */
    uint64_t blocks_address;
    uint64_t bitmaps_address;
    uint32_t poison;     /* 1: free pages that were used hold POISON_WORD */
    uint32_t untouched;  /* blocks from this one on have never left the heap */
    uint32_t lock;       /* number of the vCPU that has it + 1 */
    uint32_t wanted;     /* 1: somebody found the heap empty */
    uint64_t taken_early; /* hinted blocks that were taken into use before the host was done with them */
    struct block_list_head lists[LIST_COUNT];
};

_Static_assert(sizeof(struct heap_block) == 16, "account.rs reads it");
_Static_assert(sizeof(struct heap_header) == 80 + 8 * LIST_COUNT, "account.rs reads it");

#define HEAP_NONE 0xffffffffu /* no block: there is none */
#define HEAP_BUSY 0xfffffffeu /* no block now: another vCPU, which may be paused, has the lock */

/* The heap as one vCPU sees it in one step. */
struct heap {
    const struct guest_view *view;
    volatile struct heap_header *header;
    volatile struct vcpu_report *report; /* where damage is reported */
    uint32_t vcpu;
    uint64_t poison; /* what free pages hold with FLAG_POISON */
    uint32_t blocks, low_blocks;
    uint64_t low_first, high_first;
};

/* A run of pages of one block. */
struct heap_run {
    uint64_t gpa;
    uint32_t pages;
    uint32_t poisoned; /* so many of them, the first ones, must hold poison if free pages do */
};

/* Once, by vCPU 0, when the workloads with fixed pages are known. */
void heap_init(const struct guest_view *view);

/* 0 if what says where the heap is is damaged. */
int heap_open(struct heap *heap, const struct guest_view *view, uint32_t vcpu);

uint64_t heap_block_address(const struct heap *heap, uint32_t block);
/* The block in which the address is, or HEAP_NONE. */
uint32_t heap_block_at(const struct heap *heap, uint64_t gpa);
volatile struct heap_block *heap_block(const struct heap *heap, uint32_t block);
/* How many blocks are on a list, as far as its head says. */
uint32_t heap_count(const struct heap *heap, enum block_list list);
/* Blocks that nobody has: neither allocated nor in the balloon or on the way there. */
uint32_t heap_free_blocks(const struct heap *heap);

/* Moves a block from the first of the sources that has one: its number, HEAP_NONE or HEAP_BUSY. */
uint32_t heap_take(struct heap *heap, uint32_t sources, enum block_state state, enum block_list list);
/* Frees a block, whatever list it is on. 0 if the heap is busy. */
int heap_give(struct heap *heap, uint32_t block);

/* Frees all blocks of a source. 0 if the heap is busy. */
int heap_give_all(struct heap *heap, uint32_t source);

/* The first run of pages in this vCPU's blocks, or in a block taken for it. 1, or 0: there is none now. */
int heap_allocate(struct heap *heap, uint32_t pages, struct heap_run *run);
/* The same, in the block that was split last and in no other. */
int heap_allocate_newest(struct heap *heap, uint32_t pages, struct heap_run *run);
/* Frees pages that heap_allocate has given. They are poisoned already, if free pages are. */
void heap_free(struct heap *heap, uint64_t gpa, uint32_t pages);
/* Makes a block that is on the list of this vCPU's split blocks ready for that. */
void heap_split(struct heap *heap, uint32_t block);

/* What free pages hold if they are poisoned. */
static inline uint64_t heap_poison(uint32_t flags)
{
    return flags & FLAG_ZERO_FREED ? 0 : POISON_WORD;
}

void heap_poison_page(const struct heap *heap, uint64_t gpa);
void heap_check_poison(const struct heap *heap, uint64_t gpa);

#endif
