/*
 * Hints of free blocks (VIRTIO 1.2, section 5.5.6.4), and test writes to hinted blocks.
 *
 * A round begins with a new command ID from the host. The driver sends a buffer with that ID, then
 * one buffer for each free block, until there are no more or the host sends another command, and
 * then a buffer with COMMAND_STOP. It holds the hinted blocks until COMMAND_DONE, so that a second
 * round hints only blocks that were freed meanwhile. The guest takes held blocks when it has no
 * others (heap_allocate).
 *
 * With the word `rewrite` the driver writes to a block at each stage at which a host could mistake
 * an old hint for a new one, and keeps checking that its writes are not lost.
 */
#include "balloon_parts.h"

#define HINT_BUFFERS 1024
#define REWRITES 16                  /* number of rewritten blocks that are kept */
#define REWRITE_STRIDE 16            /* every 16th page of a block is written */
#define REWRITE_PAGES (HEAP_BLOCK_PAGES / REWRITE_STRIDE)
#define REWRITE_CHECKED_PER_TICK 16
#define REWRITE_AFTER 3              /* hinted blocks of a round, then one is rewritten */
#define REWRITE_OWNER (15u << 20)    /* in generations, instead of a vCPU's number */

enum hint_stage {
    STAGE_IDLE = 0,
    STAGE_STARTING = 1, /* the ID is not sent yet */
    STAGE_HINTING = 2,
    STAGE_ENDING = 3,   /* COMMAND_STOP is not sent yet */
};

struct rewrite {
    uint32_t block; /* + 1 */
    uint64_t generation;
};

static struct virtqueue queue;
static uint8_t queue_memory[QUEUE_BYTES(HINT_BUFFERS)] __attribute__((aligned(16)));
static uint32_t commands[HINT_BUFFERS]; /* content of buffers with a command, by descriptor */
static uint32_t stage;
static uint32_t command = COMMAND_STOP; /* the last command read from the host */
static uint32_t active;                 /* the ID of the last round */
static uint32_t hinted;                 /* blocks hinted in this round */
static int is_done;                     /* COMMAND_DONE was read, and blocks are still held */

static struct rewrite rewrites[REWRITES];
static uint64_t rewrites_made;
static uint32_t rewrite_checked; /* the next page to check, counted over all kept blocks */
static uint64_t rewrite_ticks;

int hints_make(const struct virtio_device *device)
{
    return !(device->features & BALLOON_F_FREE_PAGE_HINT) ||
           virtqueue_make(&queue, device, QUEUE_HINTS, HINT_BUFFERS, queue_memory);
}

/* ---- rewrites ---- */

static uint64_t rewrite_page(const struct heap *heap, const struct rewrite *rewrite, uint32_t index)
{
    return heap_block_address(heap, rewrite->block - 1) + index * REWRITE_STRIDE * PAGE_BYTES;
}

/* Returns the oldest block to the heap, poisoned if poison is on. */
static int forget(struct balloon *balloon, struct rewrite *rewrite)
{
    struct heap *heap = &balloon->heap;

    if (!rewrite->block)
        return 1;
    for (uint32_t index = 0; balloon->flags & FLAG_POISON && index < REWRITE_PAGES; index++)
        heap_poison_page(heap, rewrite_page(heap, rewrite, index));
    if (!heap_give(heap, rewrite->block - 1))
        return 0;
    rewrite->block = 0;
    return 1;
}

/* Takes a block from these sources and writes to it. */
static void rewrite(struct balloon *balloon, uint32_t sources)
{
    struct heap *heap = &balloon->heap;
    struct rewrite *kept = &rewrites[rewrites_made % REWRITES];

    if (!(balloon->flags & FLAG_REWRITE) || !forget(balloon, kept))
        return;
    uint32_t block = heap_take(heap, sources, BLOCK_WHOLE, LIST_NONE);
    if (block >= heap->blocks)
        return;
    kept->block = block + 1;
    kept->generation = ++rewrites_made << 24 | REWRITE_OWNER;
    uint32_t touched = heap_block(heap, block)->touched;
    for (uint32_t index = 0; index < REWRITE_PAGES; index++) {
        uint64_t gpa = rewrite_page(heap, kept, index);
        if (balloon->flags & FLAG_POISON && index * REWRITE_STRIDE < touched)
            heap_check_poison(heap, gpa);
        write_page(heap->view, generation_word, kept->generation, gpa);
    }
    balloon->report->rewrites = rewrites_made;
}

void rewrites_check(struct balloon *balloon)
{
    if (!rewrites_made || balloon->ticks == rewrite_ticks)
        return;
    rewrite_ticks = balloon->ticks;
    for (unsigned count = 0; count < REWRITE_CHECKED_PER_TICK; count++) {
        const struct rewrite *kept = &rewrites[rewrite_checked / REWRITE_PAGES];
        if (kept->block)
            check_page(balloon->view, balloon->heap.report, generation_word, kept->generation,
                       rewrite_page(&balloon->heap, kept, rewrite_checked % REWRITE_PAGES));
        if (++rewrite_checked == REWRITES * REWRITE_PAGES) {
            rewrite_checked = 0;
            balloon->report->rewrite_rounds++;
        }
    }
}

/* ---- hints ---- */

static int send(struct balloon *balloon, uint32_t value)
{
    /* The word must remain valid until the device has used it, so each descriptor has its own. */
    if (!queue.room)
        return 0;
    uint32_t *word = &commands[queue.unused[queue.room - 1]];
    *word = value;
    virtqueue_add(&queue, (uint64_t)word, sizeof *word, 0);
    virtqueue_notify(&queue, balloon->device);
    return 1;
}

static void reclaim(const struct balloon *balloon)
{
    while (virtqueue_take(&queue, balloon->device) >= 0)
        ;
}

void hints_command(struct balloon *balloon, uint32_t read)
{
    if (read == command)
        return;
    rewrite(balloon, rewrites_made % 2 ? FROM_HELD | FROM_FRESH : FROM_USED);
    command = read;
    balloon->report->command = read;
    if (stage == STAGE_STARTING)
        stage = STAGE_IDLE; /* nothing of that round was sent */
    else if (stage == STAGE_HINTING)
        stage = STAGE_ENDING;
    is_done = read == COMMAND_DONE;
    if (read == COMMAND_STOP)
        rewrite(balloon, FROM_HELD);
}

/* Hints one block. Returns its number, HEAP_NONE or HEAP_BUSY. */
static uint32_t hint(struct balloon *balloon)
{
    struct heap *heap = &balloon->heap;
    uint32_t block = heap_take(heap, FROM_USED | FROM_FRESH, BLOCK_HINTED, LIST_HELD);

    if (block >= heap->blocks)
        return block;
    if (!(balloon->device->features & BALLOON_F_PAGE_POISON))
        heap_block(heap, block)->touched = 0; /* the host does not restore poison */
    virtqueue_add(&queue, heap_block_address(heap, block), HEAP_BLOCK_BYTES, 1);
    if (++hinted == REWRITE_AFTER)
        rewrite(balloon, FROM_HELD);
    return block;
}

/* Hints free blocks while there is room. */
static int hint_blocks(struct balloon *balloon)
{
    uint32_t before = hinted;
    uint32_t block = 0;

    /* The last descriptor is reserved for COMMAND_STOP. */
    while (queue.room > 1 && !balloon_has_news(balloon)) {
        block = hint(balloon);
        if (block >= balloon->heap.blocks)
            break;
    }
    virtqueue_notify(&queue, balloon->device);
    balloon->report->hinted_blocks += hinted - before;
    if (block == HEAP_NONE) {
        stage = STAGE_ENDING;
        balloon->report->rounds_ended++;
    }
    return 1;
}

static void give_back(struct balloon *balloon)
{
    if (!heap_give_all(&balloon->heap, FROM_HELD))
        return;
    is_done = 0;
    rewrite(balloon, FROM_USED);
}

int hints_step(struct balloon *balloon)
{
    int is_busy = 0;

    if (!(balloon->device->features & BALLOON_F_FREE_PAGE_HINT))
        return 0;
    reclaim(balloon);
    if (stage == STAGE_ENDING && send(balloon, COMMAND_STOP))
        stage = STAGE_IDLE;
    if (stage == STAGE_IDLE && command > COMMAND_DONE && command != active) {
        active = command;
        hinted = 0;
        stage = STAGE_STARTING;
    }
    if (stage == STAGE_STARTING && send(balloon, active)) {
        stage = STAGE_HINTING;
        balloon->report->rounds++;
    }
    if (stage == STAGE_HINTING)
        is_busy = hint_blocks(balloon);
    if (is_done)
        give_back(balloon);
    uint32_t state = stage != STAGE_IDLE                              ? BALLOON_HINTING
                     : heap_count(&balloon->heap, LIST_HELD) != 0 ? BALLOON_HOLDING
                                                                    : BALLOON_IDLE;
    if (balloon->report->state != state)
        balloon->report->state = state;
    return is_busy || stage != STAGE_IDLE || is_done;
}
