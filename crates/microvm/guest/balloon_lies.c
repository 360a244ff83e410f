/*
 * A hostile driver, for tests of the host only: it violates the protocol when the host requests
 * hints of free blocks. The word `lie=KIND` of the command line puts it in the place of
 * balloon_hints.c. The rest of the guest is correct.
 *
 * The driver answers each new command ID with one story: buffers with lies, all made available at
 * once, and then what the kind does afterwards. A lie counts (balloon_report.lies) when the device
 * has used its buffer, or has shown an effect of it.
 *
 * `live` pages are pages of `fill`, which the guest uses and checks. All kinds but `used` hint them
 * only in ways that a host must ignore. If the host accepts such a hint, the guest reports the
 * damage. All other hints are of free blocks, held until COMMAND_DONE as by the correct driver.
 *
 *   outside  ranges that are outside memory, partly outside, empty, huge, or not whole pages
 *   overlap  one block many times, and overlapping ranges, also within one buffer
 *   used     live pages
 *   endless  buffers without end: free blocks within a round, live pages outside
 *   never    a round that begins, and then nothing
 *   id       live pages outside a round: after wrong IDs, after STOP, with an old ID
 *   chain    descriptor chains that loop, leave the table, or are too long; then a broken ring
 *   unmap    disables the queue or resets the device in a round; queues outside memory
 */
#include "balloon_lies.h"

#define TABLE (LIE_BUFFERS + 8u) /* entries of an indirect table: more than a chain may have */
#define DESCRIPTOR_NEXT 1u
#define DESCRIPTOR_INDIRECT 4u
#define NEEDS_RESET 64u

enum lie_stage {
    STAGE_IDLE = 0,
    STAGE_TELLING = 1,   /* a story is in the queue */
    STAGE_BREAKING = 2,  /* the ring is broken, and the device has not noticed yet */
    STAGE_UNMAPPING = 3, /* the device is to be started with a queue outside memory */
    STAGE_UNMAPPED = 4,  /* it was started, and has not noticed yet */
};

static struct liar liar;
static uint8_t queue_memory[QUEUE_BYTES(LIE_BUFFERS)] __attribute__((aligned(16)));
static struct ring_descriptor table[TABLE] __attribute__((aligned(16)));
static uint32_t words[LIE_BUFFERS]; /* content of buffers with a command, by descriptor */
static uint32_t command = COMMAND_STOP; /* the last command read from the host */
static uint32_t told;    /* the ID of the last story; 0: none since the device was initialized */
static uint32_t stage;
static uint32_t lies;    /* number of lies in the queue */
static uint32_t unmapping;
static uint16_t counted; /* `endless`: index of the used ring up to which lies are counted */
static uint64_t block;   /* address of a held block, or 0 */
static int is_done;      /* COMMAND_DONE was read, and blocks are still held */
static int is_restarted; /* the device was restarted, and blocks are still held */
static int is_stale;     /* the host has ended a round, which this driver will ignore */

int lies_make(const struct virtio_device *device)
{
    stage = STAGE_IDLE;
    told = 0;
    lies = 0;
    counted = 0;
    if (!(device->features & BALLOON_F_FREE_PAGE_HINT))
        return 0;
    /* A story must fit into the queue. */
    return virtqueue_make(&liar.queue, device, QUEUE_HINTS, LIE_BUFFERS, queue_memory) &&
           liar.queue.size == LIE_BUFFERS;
}

void lies_command(struct balloon *balloon, uint32_t read)
{
    command = read;
    balloon->report->command = read;
    is_done = read == COMMAND_DONE;
    is_stale = read <= COMMAND_DONE && told;
}

/* ---- the queue, with descriptors in any order, unlike virtqueue_add ---- */

static uint16_t used_index(void)
{
    return __atomic_load_n(&liar.queue.used[1], __ATOMIC_ACQUIRE);
}

static int is_processed(void)
{
    return used_index() == liar.queue.added;
}

static void place_at(uint16_t index, uint64_t address, uint32_t bytes, uint16_t flags,
                     uint16_t next)
{
    volatile struct ring_descriptor *descriptor = &liar.queue.descriptors[index];
    descriptor->address = address;
    descriptor->bytes = bytes;
    descriptor->flags = flags;
    descriptor->next = next;
}

static uint16_t place(uint64_t address, uint32_t bytes, uint16_t flags, uint16_t next)
{
    place_at(liar.placed, address, bytes, flags, next);
    return liar.placed++;
}


static void offer(uint16_t head)
{
    lies_offer(&liar.queue, head);
}

static void lie(uint16_t head)
{
    offer(head);
    lies++;
}

static uint16_t hint(uint64_t address, uint32_t bytes)
{
    return place(address, bytes, DESCRIPTOR_WRITE, 0);
}

static uint16_t word(uint32_t value)
{
    words[liar.placed] = value;
    return place((uint64_t)&words[liar.placed], sizeof words[liar.placed], 0, 0);
}

/* ---- what is hinted ---- */


static uint16_t live(const struct balloon *balloon)
{
    return hint(FIRST_WORK_ADDRESS, lies_live_bytes(balloon));
}

/* Takes a free block to hold. Returns its number, HEAP_NONE or HEAP_BUSY. */
static uint32_t hold(struct balloon *balloon)
{
    uint32_t taken = heap_take(&balloon->heap, FROM_USED | FROM_FRESH, BLOCK_HINTED, LIST_HELD);
    if (taken < balloon->heap.blocks)
        heap_block(&balloon->heap, taken)->touched = 0; /* as without PAGE_POISON */
    return taken;
}

/* Makes sure that there is a block to hint. Returns 0 if there is none at the moment. */
static int hold_block(struct balloon *balloon)
{
    if (block)
        return 1;
    uint32_t taken = hold(balloon);
    if (taken >= balloon->heap.blocks)
        return 0;
    block = heap_block_address(&balloon->heap, taken);
    return 1;
}

static void give_back(struct balloon *balloon)
{
    if (!heap_give_all(&balloon->heap, FROM_HELD))
        return;
    block = 0;
    is_done = 0;
    is_restarted = 0;
}

/* ---- stories. The queue is empty before. Each returns 0 if it cannot be told now. ---- */

static int tell_outside(struct balloon *balloon)
{
    const struct guest_view *view = balloon->view;
    struct heap *heap = &balloon->heap;
    uint32_t taken, last = heap_block_at(heap, view->low_bytes - PAGE_BYTES);

    /* The last block below the end of memory must be free, and there must be no memory above. */
    while ((taken = hold(balloon)) < heap->blocks)
        ;
    if (taken == HEAP_BUSY || last == HEAP_NONE || heap_block(heap, last)->list != LIST_HELD ||
        view->high_bytes || view->display_base)
        return 0;
    uint64_t at = heap_block_address(heap, last), end = view->low_bytes;
    const struct {
        uint64_t address;
        uint32_t bytes;
    } ranges[] = {
        {end, HEAP_BLOCK_BYTES},
        {HOLE_ADDRESS, PAGE_BYTES},
        {balloon->device->address, PAGE_BYTES},
        {HIGH_ADDRESS, HEAP_BLOCK_BYTES},
        {-PAGE_BYTES, PAGE_BYTES},
        {-PAGE_BYTES / 2, PAGE_BYTES}, /* wraps around the end of the address space */
        {end, 0},
        {at, 0},
        {at + 8, 16},
        /* Parts of these are valid: one page, one page, the whole block. */
        {end - PAGE_BYTES, 2 * PAGE_BYTES},
        {at + 1, 3 * PAGE_BYTES - 2},
        {at, 0xffffffffu},
    };
    offer(word(command));
    for (unsigned range = 0; range < sizeof ranges / sizeof *ranges; range++)
        lie(hint(ranges[range].address, ranges[range].bytes));
    offer(word(COMMAND_STOP));
    return 1;
}

static int tell_overlap(struct balloon *balloon)
{
    if (!hold_block(balloon))
        return 0;
    offer(word(command));
    for (unsigned count = 0; count < 8; count++)
        lie(hint(block, HEAP_BLOCK_BYTES));
    for (unsigned count = 0; count < 8; count++)
        lie(hint(block + count * PAGE_BYTES, 2 * MIB_BYTES));
    uint16_t second = hint(block + MIB_BYTES, 2 * MIB_BYTES);
    lie(place(block, 2 * MIB_BYTES, DESCRIPTOR_WRITE | DESCRIPTOR_NEXT, second));
    offer(word(COMMAND_STOP));
    return 1;
}

static int tell_used(struct balloon *balloon)
{
    uint64_t bytes = lies_live_pages(balloon) * PAGE_BYTES;

    offer(word(command));
    for (uint64_t at = 0; at < bytes && liar.placed + 1u < LIE_BUFFERS; at += MIB_BYTES)
        lie(hint(FIRST_WORK_ADDRESS + at,
                 (uint32_t)(bytes - at < MIB_BYTES ? bytes - at : MIB_BYTES)));
    offer(word(COMMAND_STOP));
    return 1;
}

static int tell_never(struct balloon *balloon)
{
    if (!hold_block(balloon))
        return 0;
    offer(word(command));
    lie(hint(block, HEAP_BLOCK_BYTES));
    return 1;
}

static int tell_id(struct balloon *balloon)
{
    const uint32_t wrong[] = {command + 1, command - 1, COMMAND_DONE, 0xffffffffu, COMMAND_STOP};

    if (!hold_block(balloon))
        return 0;
    lie(live(balloon));
    for (unsigned count = 0; count < sizeof wrong / sizeof *wrong; count++) {
        offer(word(wrong[count]));
        lie(live(balloon));
    }
    offer(word(command));
    offer(hint(block, HEAP_BLOCK_BYTES)); /* the only valid hint */
    lie(word(command + 1));
    lie(live(balloon));
    lie(word(command)); /* an ended round does not begin again */
    lie(live(balloon));
    offer(word(COMMAND_STOP));
    lie(live(balloon));
    return 1;
}

/* Hints for a round that the host has ended. */
static void tell_stale(struct balloon *balloon)
{
    liar.placed = 0;
    offer(word(told));
    lie(live(balloon));
}

static int tell_chain(struct balloon *balloon)
{
    uint32_t bytes = lies_live_bytes(balloon);
    uint64_t end = balloon->view->low_bytes;

    for (uint16_t entry = 0; entry < TABLE; entry++)
        table[entry] = (struct ring_descriptor){
            FIRST_WORK_ADDRESS, bytes,
            DESCRIPTOR_WRITE | (entry + 1u < TABLE ? DESCRIPTOR_NEXT : 0), (uint16_t)(entry + 1)};
    offer(word(command));
    const uint16_t more = DESCRIPTOR_WRITE | DESCRIPTOR_NEXT;
    lie(place(FIRST_WORK_ADDRESS, bytes, more, liar.placed)); /* its own successor */
    uint16_t second = place(FIRST_WORK_ADDRESS, bytes, more, liar.placed + 1);
    lie(place(FIRST_WORK_ADDRESS, bytes, more, second));
    lie(place(FIRST_WORK_ADDRESS, bytes, more, LIE_BUFFERS));
    lie(place(FIRST_WORK_ADDRESS, bytes, more, 0xffff));
    second = word(command); /* a readable descriptor after a writable one */
    lie(place(FIRST_WORK_ADDRESS, bytes, more, second));
    second = hint(FIRST_WORK_ADDRESS, 0xffffffffu); /* 8 GiB in all */
    lie(place(FIRST_WORK_ADDRESS, 0xffffffffu, more, second));
    lie(place((uint64_t)table, sizeof table, DESCRIPTOR_INDIRECT, 0));
    lie(place((uint64_t)table, sizeof table - 1, DESCRIPTOR_INDIRECT, 0));
    lie(place((uint64_t)table, 0, DESCRIPTOR_INDIRECT, 0));
    lie(place(end, sizeof table, DESCRIPTOR_INDIRECT, 0));
    lie(place(end, 4, 0, 0)); /* a command outside memory */
    lie(place((uint64_t)&words[0], 3, 0, 0));
    lie(place((uint64_t)&words[0], 64, 0, 0));
    return 1;
}

static int tell_unmap(struct balloon *balloon)
{
    if (!hold_block(balloon))
        return 0;
    offer(word(command));
    offer(hint(block, HEAP_BLOCK_BYTES));
    return 1;
}

/* ---- after a story ---- */

/* Continues once the device asks for a reset. */
static void go_on(struct balloon *balloon)
{
    if (stage == STAGE_UNMAPPING) {
        if (lies_begin_unmapped(balloon, &liar, unmapping))
            stage = STAGE_UNMAPPED;
        return;
    }
    if (!(virtio_read(balloon->device, VIRTIO_STATUS) & NEEDS_RESET))
        return;
    balloon->report->lies++;
    if (stage == STAGE_UNMAPPED && ++unmapping < LIE_UNMAPPINGS) {
        stage = STAGE_UNMAPPING;
        return;
    }
    unmapping = 0;
    /* The device is initialized again after this step, and the held blocks are returned. */
    stage = STAGE_IDLE;
    balloon->must_restart = 1;
    is_restarted = 1;
}

/* ---- steps ---- */

static void tell(struct balloon *balloon)
{
    static int (*const tellers[LIE_COUNT])(struct balloon *) = {
        [LIE_OUTSIDE] = tell_outside, [LIE_OVERLAP] = tell_overlap, [LIE_USED] = tell_used,
        [LIE_NEVER] = tell_never,     [LIE_ID] = tell_id,           [LIE_CHAIN] = tell_chain,
        [LIE_UNMAP] = tell_unmap,
    };

    liar.placed = 0;
    if (!tellers[LIE_OF(balloon->flags)](balloon))
        return;
    told = command;
    liar.stories++;
    stage = STAGE_TELLING;
    balloon->report->rounds++;
    virtqueue_notify(&liar.queue, balloon->device);
}

static void end_story(struct balloon *balloon)
{
    uint32_t kind = LIE_OF(balloon->flags);

    balloon->report->lies += lies;
    lies = 0;
    stage = STAGE_IDLE;
    if (kind == LIE_CHAIN) {
        lies_break_ring(balloon, &liar);
        stage = STAGE_BREAKING;
    } else if (kind == LIE_UNMAP) {
        lies_take_away(balloon, &liar);
        stage = STAGE_UNMAPPING;
    }
}

/* Keeps the queue full. */
static void lie_endlessly(struct balloon *balloon)
{
    uint16_t used = used_index();

    balloon->report->lies += (uint16_t)(used - counted);
    counted = used;
    if (command <= COMMAND_DONE && !balloon->report->rounds)
        return; /* no hints were requested yet */
    int is_new = command > COMMAND_DONE && command != told && hold_block(balloon);
    while ((uint16_t)(liar.queue.added - used) < liar.queue.size) {
        /* The device uses buffers in order, so this descriptor is free again. */
        liar.placed = liar.queue.added % liar.queue.size;
        uint16_t head = liar.placed;
        if (is_new) {
            word(command);
            told = command;
            is_new = 0;
            balloon->report->rounds++;
        } else if (command == told) {
            hint(block, HEAP_BLOCK_BYTES);
        } else {
            live(balloon);
        }
        offer(head);
    }
    virtqueue_notify(&liar.queue, balloon->device);
}

int lies_step(struct balloon *balloon)
{
    int is_endless = LIE_OF(balloon->flags) == LIE_ENDLESS;

    if (is_done || is_restarted)
        give_back(balloon);
    if (is_endless) {
        lie_endlessly(balloon);
    } else if (stage == STAGE_TELLING && is_processed()) {
        end_story(balloon);
    } else if (stage > STAGE_TELLING) {
        go_on(balloon);
    } else if (stage == STAGE_IDLE && command > COMMAND_DONE && command != told) {
        tell(balloon);
    } else if (stage == STAGE_IDLE && is_stale && LIE_OF(balloon->flags) == LIE_ID) {
        is_stale = 0;
        tell_stale(balloon);
        virtqueue_notify(&liar.queue, balloon->device);
        stage = STAGE_TELLING;
    }
    uint32_t state = heap_count(&balloon->heap, LIST_HELD) ? BALLOON_HOLDING : BALLOON_IDLE;
    if (balloon->report->state != state && balloon->report->state != BALLOON_FAILED)
        balloon->report->state = state;
    return stage > STAGE_TELLING || (is_endless && balloon->report->rounds);
}
