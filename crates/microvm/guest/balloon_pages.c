/*
 * Inflation, deflation (VIRTIO 1.2, section 5.5.6) and reporting (section 5.5.6.6), in whole
 * blocks.
 *
 * Only one batch is in the queues at a time, and the device uses all of it before the next one. So
 * no block is deflated before the host has it, and none is reused before the host has released it.
 */
#include "balloon_parts.h"

#define PFNS_PER_BUFFER 256u /* as in Linux */
#define BUFFERS_PER_BLOCK (HEAP_BLOCK_PAGES / PFNS_PER_BUFFER)
#define BATCH_BLOCKS 16u
#define BATCH_BUFFERS (BATCH_BLOCKS * BUFFERS_PER_BLOCK)
#define REPORTED_BLOCKS 32u     /* at a time, as in Linux */
#define REPORTING_TICKS 500     /* between two reports */
#define RETRY_TICKS 200         /* after the heap had no block for the balloon */
#define POISONED_PAGES_PER_STEP 64u
#define CONFIG_ACTUAL (VIRTIO_CONFIG + 4)

static struct virtqueue inflate_queue, deflate_queue, reports_queue;
static uint8_t inflate_memory[QUEUE_BYTES(BATCH_BUFFERS)] __attribute__((aligned(16)));
static uint8_t deflate_memory[QUEUE_BYTES(BATCH_BUFFERS)] __attribute__((aligned(16)));
static uint8_t reports_memory[QUEUE_BYTES(REPORTED_BLOCKS)] __attribute__((aligned(16)));
static uint32_t pfns[BATCH_BUFFERS][PFNS_PER_BUFFER];

static uint32_t target;         /* blocks */
static int is_adjusting;        /* the target was not reached since it was set */
static int is_actual_old;       /* the device's `actual` must be updated */
static uint64_t retry_ticks;
static uint64_t reporting_ticks;
static uint32_t returning;      /* the deflated block that is being poisoned, + 1 */
static uint32_t returning_page;

int pages_make(const struct virtio_device *device)
{
    return virtqueue_make(&inflate_queue, device, QUEUE_INFLATE, BATCH_BUFFERS, inflate_memory) &&
           virtqueue_make(&deflate_queue, device, QUEUE_DEFLATE, BATCH_BUFFERS, deflate_memory) &&
           (!(device->features & BALLOON_F_PAGE_REPORTING) ||
            virtqueue_make(&reports_queue, device, QUEUE_REPORTS, REPORTED_BLOCKS, reports_memory));
}

void pages_target(struct balloon *balloon, uint32_t blocks)
{
    if (blocks == target)
        return;
    target = blocks;
    is_adjusting = 1;
    retry_ticks = 0;
    balloon->report->target_blocks = blocks;
}

/* ---- inflate and deflate ---- */

static void add_block(struct balloon *balloon, struct virtqueue *queue, uint32_t block,
                      uint32_t index)
{
    uint32_t pfn = (uint32_t)(heap_block_address(&balloon->heap, block) / PAGE_BYTES);

    for (uint32_t buffer = index * BUFFERS_PER_BLOCK; buffer < (index + 1) * BUFFERS_PER_BLOCK;
         buffer++) {
        for (uint32_t page = 0; page < PFNS_PER_BUFFER; page++)
            pfns[buffer][page] = pfn++;
        virtqueue_add(queue, (uint64_t)pfns[buffer], sizeof pfns[buffer], 0);
    }
}

/* Sends up to `most` blocks of these sources and moves them to `list`. Returns their number. */
static uint32_t send_batch(struct balloon *balloon, struct virtqueue *queue, uint32_t most,
                           uint32_t sources, enum block_list list)
{
    struct heap *heap = &balloon->heap;
    uint32_t limit = queue->size / BUFFERS_PER_BLOCK, count = 0;

    most = most < BATCH_BLOCKS ? most : BATCH_BLOCKS;
    most = most < limit ? most : limit;
    for (; count < most; count++) {
        uint32_t block = heap_take(heap, sources, BLOCK_INFLATED, list);
        if (block >= heap->blocks)
            break;
        heap_block(heap, block)->used = 0; /* the host discards the memory and its content */
        heap_block(heap, block)->touched = 0;
        add_block(balloon, queue, block, count);
    }
    if (count) {
        virtqueue_notify(queue, balloon->device);
        is_actual_old = 1;
    }
    return count;
}

static void deflate(struct balloon *balloon, uint32_t blocks)
{
    send_batch(balloon, &deflate_queue, blocks, FROM_INFLATED, LIST_DEFLATING);
}

/* Returns deflated blocks to the heap, poisoned if poison is on. Returns 1 if there are more. */
static int return_blocks(struct balloon *balloon)
{
    struct heap *heap = &balloon->heap;

    if (!(balloon->flags & FLAG_POISON))
        return heap_count(heap, LIST_DEFLATING) && !heap_give_all(heap, FROM_DEFLATING);
    if (!returning) {
        uint32_t block = heap_take(heap, FROM_DEFLATING, BLOCK_WHOLE, LIST_NONE);
        if (block >= heap->blocks)
            return block == HEAP_BUSY;
        returning = block + 1;
        returning_page = 0;
    }
    uint64_t gpa = heap_block_address(heap, returning - 1);
    for (uint32_t count = 0; count < POISONED_PAGES_PER_STEP && returning_page < HEAP_BLOCK_PAGES;
         count++)
        heap_poison_page(heap, gpa + returning_page++ * PAGE_BYTES);
    if (returning_page == HEAP_BLOCK_PAGES) {
        heap_block(heap, returning - 1)->touched = HEAP_BLOCK_PAGES;
        if (heap_give(heap, returning - 1))
            returning = 0;
    }
    return 1;
}

static void take_all(struct virtqueue *queue, const struct balloon *balloon)
{
    while (virtqueue_take(queue, balloon->device) >= 0)
        ;
}

static int adjust(struct balloon *balloon)
{
    uint32_t have = heap_count(&balloon->heap, LIST_INFLATED);

    if (have > target) {
        deflate(balloon, have - target);
    } else if (have < target) {
        if (balloon->ticks < retry_ticks)
            return 0;
        if (!send_batch(balloon, &inflate_queue, target - have, FROM_USED | FROM_FRESH,
                        LIST_INFLATED)) {
            retry_ticks = balloon->ticks + RETRY_TICKS;
            return 0;
        }
    } else {
        is_adjusting = 0;
    }
    return 1;
}

/* Deflates a block if a vCPU found the heap empty. */
static int deflate_on_demand(struct balloon *balloon)
{
    struct heap *heap = &balloon->heap;

    if (!heap->header->wanted)
        return 0;
    heap->header->wanted = 0;
    if (!(balloon->device->features & BALLOON_F_DEFLATE_ON_OOM) || !heap_count(heap, LIST_INFLATED))
        return 0;
    /* The driver inflates again only after a new target, but it still deflates to the target. */
    is_adjusting = heap_count(heap, LIST_INFLATED) > target;
    balloon->report->deflated_on_demand++;
    deflate(balloon, 1);
    return 1;
}

static int balloon_pages_step(struct balloon *balloon)
{
    take_all(&inflate_queue, balloon);
    take_all(&deflate_queue, balloon);
    if (!virtqueue_is_quiet(&inflate_queue) || !virtqueue_is_quiet(&deflate_queue))
        return 0; /* checked again at the next tick */
    if (return_blocks(balloon))
        return 1;
    if (is_actual_old) {
        is_actual_old = 0;
        virtio_write(balloon->device, CONFIG_ACTUAL,
                     heap_count(&balloon->heap, LIST_INFLATED) * HEAP_BLOCK_PAGES);
    }
    if (deflate_on_demand(balloon))
        return 1;
    return is_adjusting && adjust(balloon);
}

/* ---- reports ---- */

/* Returns reported blocks to the heap. Returns 0 if the heap is busy. */
static int take_reported(struct balloon *balloon)
{
    struct heap *heap = &balloon->heap;

    for (;;) {
        uint32_t block = heap_take(heap, FROM_REPORTING, BLOCK_REPORTING, LIST_NONE);
        if (block >= heap->blocks)
            return block == HEAP_NONE;
        heap_block(heap, block)->used = 0;
        if (!(balloon->device->features & BALLOON_F_PAGE_POISON))
            heap_block(heap, block)->touched = 0;
        if (!heap_give(heap, block))
            return 0;
        balloon->report->reported_blocks++;
    }
}

static void report_step(struct balloon *balloon)
{
    struct heap *heap = &balloon->heap;

    take_all(&reports_queue, balloon);
    if (!virtqueue_is_quiet(&reports_queue))
        return;
    if (heap_count(heap, LIST_REPORTING) && !take_reported(balloon))
        return;
    if (balloon->ticks < reporting_ticks)
        return;
    reporting_ticks = balloon->ticks + REPORTING_TICKS;
    while (reports_queue.room) {
        uint32_t block = heap_take(heap, FROM_USED, BLOCK_REPORTING, LIST_REPORTING);
        if (block >= heap->blocks)
            break;
        virtqueue_add(&reports_queue, heap_block_address(heap, block), HEAP_BLOCK_BYTES, 1);
    }
    virtqueue_notify(&reports_queue, balloon->device);
}

int pages_step(struct balloon *balloon)
{
    if (balloon->device->features & BALLOON_F_PAGE_REPORTING)
        report_step(balloon);
    return balloon_pages_step(balloon);
}
