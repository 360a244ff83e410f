/*
 * The guest's allocator. It manages the memory that the workloads with fixed pages leave, in blocks
 * of 4 MiB.
 *
 * All its state is in guest memory at fixed addresses, so that it migrates, and so that the VMM can
 * read which pages are free (crates/microvm/src/account.rs has the same layout):
 *   0x400000              struct heap_header
 *   0x410000..0x418000    struct churn_state, a page for each vCPU (churn.h)
 *   0x480000..0x580000    struct heap_block, one for each block
 *   0x600000..0x800000    the live buffers of each vCPU (churn.h), 256 KiB each
 *   0x800000..0x1000000   a bitmap of the allocated pages of each block
 * Unused parts of this memory remain zero: a block that was never taken has no state yet, and a
 * block that was never split has no bitmap yet.
 *
 * A lock protects the lists that all vCPUs share. A split block belongs to one vCPU, which
 * allocates runs of its pages without the lock. When its last page is freed, the block is shared
 * again.
 *
 * This memory may have been damaged on its way from another host. Values from it are checked before
 * they are used as addresses, and invalid values are reported as corruption.
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

/* The pattern of Linux's page_poisoning. Linux's init_on_free writes 0. */
#define POISON_WORD 0xaaaaaaaaaaaaaaaaull

/*
 * The state of a block. The VMM counts blocks as free in all states but BLOCK_WHOLE and
 * BLOCK_SPLIT. In a split block it counts the free pages.
 */
enum block_state {
    BLOCK_FREE = 0,
    BLOCK_WHOLE = 1,     /* allocated whole */
    BLOCK_SPLIT = 2,     /* one vCPU allocates pages of it */
    BLOCK_HINTED = 3,    /* hinted to the host as free, and held by the balloon driver */
    BLOCK_INFLATED = 4,  /* in the balloon */
    BLOCK_REPORTING = 5, /* being reported as free; not to be used until the host has seen it */
};

/* The list that a block is on. */
enum block_list {
    LIST_NONE = 0,      /* allocated whole, or never taken */
    LIST_USED = 1,      /* free, and was written: the host has memory for it */
    LIST_FRESH = 2,     /* free, and the host has no memory for it */
    LIST_HELD = 3,      /* hinted */
    LIST_INFLATED = 4,
    LIST_DEFLATING = 5, /* leaves the balloon when the device has used the buffers */
    LIST_REPORTING = 6,
    LIST_SPLIT = 8,     /* the first of one list per vCPU */
    LIST_COUNT = LIST_SPLIT + REPORT_MAX_VCPUS,
};

/* The sources of a block: a set of these, which are tried in this order. */
enum heap_source {
    FROM_USED = 1 << 0,
    FROM_FRESH = 1 << 1, /* includes the blocks that were never taken */
    FROM_HELD = 1 << 2,
    FROM_INFLATED = 1 << 3,
    FROM_DEFLATING = 1 << 4,
    FROM_REPORTING = 1 << 5,
};

struct heap_block {
    uint8_t state;
    uint8_t list;
    uint8_t used;       /* 1: was written since it was last given to the host */
    uint8_t reserved;
    uint16_t touched;   /* with poison: exactly the free pages below this one contain poison */
    uint16_t run_limit; /* of a split block: an upper limit of its longest run of free pages */
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
    uint32_t low_blocks; /* number of blocks below 4 GiB */
    uint64_t low_first;  /* guest-physical address of block 0 */
    uint64_t high_first; /* guest-physical address of block `low_blocks` */
    uint64_t blocks_address;
    uint64_t bitmaps_address;
    uint32_t poison;     /* 1: free pages that were used contain POISON_WORD */
    uint32_t untouched;  /* blocks from this one on were never taken */
    uint32_t lock;       /* number of the vCPU that has the lock + 1 */
    uint32_t wanted;     /* 1: a vCPU found the heap empty */
    uint64_t taken_early; /* hinted blocks that were used again before COMMAND_DONE */
    struct block_list_head lists[LIST_COUNT];
};

_Static_assert(sizeof(struct heap_block) == 16, "account.rs reads it");
_Static_assert(sizeof(struct heap_header) == 80 + 8 * LIST_COUNT, "account.rs reads it");

#define HEAP_NONE 0xffffffffu /* no block available */
#define HEAP_BUSY 0xfffffffeu /* another vCPU, which may be paused, has the lock */

/* The context of one vCPU for one step. */
struct heap {
    const struct guest_view *view;
    volatile struct heap_header *header;
    volatile struct vcpu_report *report; /* for corruption */
    uint32_t vcpu;
    uint64_t poison; /* the content of free pages with FLAG_POISON */
    uint32_t blocks, low_blocks;
    uint64_t low_first, high_first;
};

/* A run of pages of one block. */
struct heap_run {
    uint64_t gpa;
    uint32_t pages;
    uint32_t poisoned; /* number of its first pages that must contain poison if poison is on */
};

/* To be called once, by vCPU 0, when the sizes of the workloads with fixed pages are known. */
void heap_init(const struct guest_view *view);

/* Returns 0 if the description of the heap is damaged. */
int heap_open(struct heap *heap, const struct guest_view *view, uint32_t vcpu);

uint64_t heap_block_address(const struct heap *heap, uint32_t block);
/* The block at this address, or HEAP_NONE. */
uint32_t heap_block_at(const struct heap *heap, uint64_t gpa);
volatile struct heap_block *heap_block(const struct heap *heap, uint32_t block);
/* Number of blocks on a list, as counted in its head. */
uint32_t heap_count(const struct heap *heap, enum block_list list);
/* Number of blocks that are neither allocated, nor in the balloon or on their way into it. */
uint32_t heap_free_blocks(const struct heap *heap);

/*
 * Takes a block from the first source that has one, and puts it on `list`. Returns its number,
 * HEAP_NONE or HEAP_BUSY.
 */
uint32_t heap_take(struct heap *heap, uint32_t sources, enum block_state state,
                   enum block_list list);
/* Frees a block of any list. Returns 0 if the heap is busy. */
int heap_give(struct heap *heap, uint32_t block);

/* Frees all blocks of a source. Returns 0 if the heap is busy. */
int heap_give_all(struct heap *heap, uint32_t source);

/*
 * Allocates a run of pages in this vCPU's blocks, or in a new block. Returns 0 if there is none at
 * the moment.
 */
int heap_allocate(struct heap *heap, uint32_t pages, struct heap_run *run);
/* Allocates a run of pages in the block that this vCPU has split last, and in no other. */
int heap_allocate_newest(struct heap *heap, uint32_t pages, struct heap_run *run);
/* Frees allocated pages. If poison is on, the caller has poisoned them. */
void heap_free(struct heap *heap, uint64_t gpa, uint32_t pages);
/* Initializes a block that was put on the list of this vCPU's split blocks. */
void heap_split(struct heap *heap, uint32_t block);

/* The content of poisoned pages. */
static inline uint64_t heap_poison(uint32_t flags)
{
    return flags & FLAG_ZERO_FREED ? 0 : POISON_WORD;
}

void heap_poison_page(const struct heap *heap, uint64_t gpa);
void heap_check_poison(const struct heap *heap, uint64_t gpa);

#endif
