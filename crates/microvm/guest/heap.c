/* The guest's allocator. See heap.h. */
#include "heap.h"

#include "work.h"

#define LOCK_TRIES 20000 /* about a millisecond: the vCPU that has the lock may be throttled */

static volatile struct heap_header *heap_header(const struct guest_view *view)
{
    return (volatile struct heap_header *)words_at(view, HEAP_ADDRESS);
}

static uint64_t round_up(uint64_t address)
{
    return (address + HEAP_BLOCK_BYTES - 1) & ~(HEAP_BLOCK_BYTES - 1);
}

/* Computes the blocks of the heap from the guest's memory and the pages that are taken already. */
static void find_blocks(const struct guest_view *view, uint64_t taken_pages, struct heap *heap)
{
    uint64_t low_pages = low_work_pages(view),
             low_end = FIRST_WORK_ADDRESS + low_pages * PAGE_BYTES;
    uint64_t low_first = round_up(FIRST_WORK_ADDRESS + taken_pages * PAGE_BYTES);
    uint64_t high_taken = taken_pages > low_pages ? (taken_pages - low_pages) * PAGE_BYTES : 0;
    uint64_t high_first = round_up(HIGH_ADDRESS + high_taken),
             high_end = HIGH_ADDRESS + view->high_bytes;
    uint64_t low = low_end > low_first ? (low_end - low_first) / HEAP_BLOCK_BYTES : 0;
    uint64_t high = high_end > high_first ? (high_end - high_first) / HEAP_BLOCK_BYTES : 0;

    /* Low RAM has fewer than 1,024 blocks. */
    high = high < HEAP_MAX_BLOCKS - low ? high : HEAP_MAX_BLOCKS - low;
    heap->low_first = low_first;
    heap->high_first = high_first;
    heap->low_blocks = (uint32_t)low;
    heap->blocks = (uint32_t)(low + high);
}

static uint64_t taken_pages(volatile struct guest_report *guest)
{
    return guest->fill_pages + guest->read_pages + guest->hot_pages;
}

void heap_init(const struct guest_view *view)
{
    volatile struct heap_header *header = heap_header(view);
    volatile struct guest_report *guest = guest_report(view);
    struct heap heap;

    find_blocks(view, taken_pages(guest), &heap);
    header->version = HEAP_VERSION;
    header->block_bytes = HEAP_BLOCK_BYTES;
    header->blocks = heap.blocks;
    header->low_blocks = heap.low_blocks;
    header->low_first = heap.low_first;
    header->high_first = heap.high_first;
    header->blocks_address = HEAP_BLOCKS_ADDRESS;
    header->bitmaps_address = HEAP_BITMAPS_ADDRESS;
    header->poison = guest->flags & FLAG_POISON ? 1 : 0;
    header->magic = HEAP_MAGIC;
}

int heap_open(struct heap *heap, const struct guest_view *view, uint32_t vcpu)
{
    volatile struct guest_report *guest = guest_report(view);
    uint64_t taken = taken_pages(guest), pages = work_pages(view);

    heap->view = view;
    heap->header = heap_header(view);
    heap->report = vcpu_report(view, vcpu);
    heap->vcpu = vcpu;
    heap->poison = heap_poison(guest->flags);
    /* Checked one by one, because the sum may overflow. */
    if (guest->fill_pages > pages || guest->read_pages > pages || guest->hot_pages > pages ||
        taken > pages) {
        report_corruption(heap->report, REPORT_ADDRESS, pages, taken);
        return 0;
    }
    find_blocks(view, taken, heap);
    if (heap->header->magic != HEAP_MAGIC || heap->header->blocks != heap->blocks ||
        heap->header->untouched > heap->blocks) {
        report_corruption(heap->report, HEAP_ADDRESS, heap->blocks, heap->header->blocks);
        return 0;
    }
    return 1;
}

uint64_t heap_block_address(const struct heap *heap, uint32_t block)
{
    return block < heap->low_blocks
               ? heap->low_first + block * HEAP_BLOCK_BYTES
               : heap->high_first + (block - heap->low_blocks) * HEAP_BLOCK_BYTES;
}

uint32_t heap_block_at(const struct heap *heap, uint64_t gpa)
{
    uint64_t block = HEAP_NONE;

    if (gpa >= heap->high_first)
        block = heap->low_blocks + (gpa - heap->high_first) / HEAP_BLOCK_BYTES;
    else if (gpa >= heap->low_first &&
             (gpa - heap->low_first) / HEAP_BLOCK_BYTES < heap->low_blocks)
        block = (gpa - heap->low_first) / HEAP_BLOCK_BYTES;
    return block < heap->blocks ? (uint32_t)block : HEAP_NONE;
}

volatile struct heap_block *heap_block(const struct heap *heap, uint32_t block)
{
    return (volatile struct heap_block *)words_at(
        heap->view, HEAP_BLOCKS_ADDRESS + block * sizeof(struct heap_block));
}

uint32_t heap_count(const struct heap *heap, enum block_list list)
{
    return heap->header->lists[list].count;
}

uint32_t heap_free_blocks(const struct heap *heap)
{
    return heap_count(heap, LIST_USED) + heap_count(heap, LIST_FRESH) + heap->blocks -
           heap->header->untouched;
}

/* ---- lists, which are stacks ---- */

static int lock(struct heap *heap)
{
    for (unsigned tries = 0; tries < LOCK_TRIES; tries++) {
        uint32_t owner = 0;
        if (__atomic_compare_exchange_n(&heap->header->lock, &owner, heap->vcpu + 1, 0,
                                        __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
            return 1;
        if (owner == heap->vcpu + 1 || owner > REPORT_MAX_VCPUS) {
            report_corruption(heap->report, HEAP_ADDRESS, 0, owner);
            return 0;
        }
        __asm__ volatile("pause");
    }
    return 0;
}

static void unlock(struct heap *heap)
{
    __atomic_store_n(&heap->header->lock, 0, __ATOMIC_RELEASE);
}

/* Whether the block exists and is on the list. If not, a corruption is reported. */
static int is_on(struct heap *heap, uint32_t block, uint32_t list)
{
    if (block >= heap->blocks) {
        report_corruption(heap->report, HEAP_ADDRESS, heap->blocks, block);
        return 0;
    }
    uint8_t found = heap_block(heap, block)->list;
    if (found != list)
        report_corruption(heap->report, HEAP_BLOCKS_ADDRESS, list, found);
    return found == list;
}

static void push(struct heap *heap, uint32_t list, uint32_t block)
{
    volatile struct block_list_head *head = &heap->header->lists[list];
    volatile struct heap_block *state = heap_block(heap, block);
    uint32_t next = head->head;

    if (next && is_on(heap, next - 1, list))
        heap_block(heap, next - 1)->previous = block + 1;
    state->next = next;
    state->previous = 0;
    state->list = (uint8_t)list;
    head->head = block + 1;
    head->count++;
}

static void unlink(struct heap *heap, uint32_t block)
{
    volatile struct heap_block *state = heap_block(heap, block);
    uint32_t list = state->list, next = state->next, previous = state->previous;

    state->list = LIST_NONE;
    if (list == LIST_NONE || list >= LIST_COUNT)
        return;
    volatile struct block_list_head *head = &heap->header->lists[list];
    if (next && is_on(heap, next - 1, list))
        heap_block(heap, next - 1)->previous = previous;
    if (!previous)
        head->head = next;
    else if (is_on(heap, previous - 1, list))
        heap_block(heap, previous - 1)->next = next;
    head->count--;
}

static uint32_t pop(struct heap *heap, uint32_t list)
{
    uint32_t head = heap->header->lists[list].head;

    if (!head || !is_on(heap, head - 1, list))
        return HEAP_NONE;
    unlink(heap, head - 1);
    return head - 1;
}

static uint32_t pop_any(struct heap *heap, uint32_t sources)
{
    static const struct {
        uint32_t source, list;
    } order[] = {
        {FROM_USED, LIST_USED},           {FROM_FRESH, LIST_FRESH},
        {FROM_HELD, LIST_HELD},           {FROM_INFLATED, LIST_INFLATED},
        {FROM_DEFLATING, LIST_DEFLATING}, {FROM_REPORTING, LIST_REPORTING},
    };

    for (unsigned index = 0; index < sizeof order / sizeof *order; index++) {
        if (!(sources & order[index].source))
            continue;
        uint32_t block = pop(heap, order[index].list);
        if (block != HEAP_NONE)
            return block;
        if (order[index].source == FROM_FRESH && heap->header->untouched < heap->blocks)
            return heap->header->untouched++;
    }
    return HEAP_NONE;
}

uint32_t heap_take(struct heap *heap, uint32_t sources, enum block_state state,
                   enum block_list list)
{
    if (!lock(heap))
        return HEAP_BUSY;
    uint32_t block = pop_any(heap, sources);
    if (block != HEAP_NONE) {
        volatile struct heap_block *taken = heap_block(heap, block);
        if (taken->state == BLOCK_HINTED)
            heap->header->taken_early++;
        taken->state = (uint8_t)state;
        if (state == BLOCK_WHOLE || state == BLOCK_SPLIT)
            taken->used = 1;
        if (list != LIST_NONE)
            push(heap, list, block);
    } else if (sources & FROM_USED && sources & FROM_HELD) {
        heap->header->wanted = 1; /* only the balloon has blocks left */
    }
    unlock(heap);
    return block;
}

static void give(struct heap *heap, uint32_t block)
{
    volatile struct heap_block *given = heap_block(heap, block);

    given->state = BLOCK_FREE;
    push(heap, given->used ? LIST_USED : LIST_FRESH, block);
}

int heap_give(struct heap *heap, uint32_t block)
{
    if (!lock(heap))
        return 0;
    unlink(heap, block);
    give(heap, block);
    unlock(heap);
    return 1;
}

int heap_give_all(struct heap *heap, uint32_t source)
{
    if (!lock(heap))
        return 0;
    for (uint32_t block = pop_any(heap, source); block != HEAP_NONE; block = pop_any(heap, source))
        give(heap, block);
    unlock(heap);
    return 1;
}

/* ---- pages of split blocks ---- */

static volatile uint64_t *bitmap_of(const struct heap *heap, uint32_t block)
{
    return words_at(heap->view, HEAP_BITMAPS_ADDRESS + block * (uint64_t)(HEAP_BITMAP_WORDS * 8));
}

/* The first page of the first run of `pages` free pages, or HEAP_NONE. */
static uint32_t find_run(volatile uint64_t *bitmap, uint32_t pages)
{
    uint32_t page = 0, run = 0;

    while (page < HEAP_BLOCK_PAGES) {
        uint64_t bits = bitmap[page / 64];
        if (page % 64 == 0 && (bits == 0 || bits == ~0ull)) {
            run = bits ? 0 : run + 64;
            page += 64;
        } else {
            run = bits >> page % 64 & 1 ? 0 : run + 1;
            page++;
        }
        if (run >= pages)
            return page - run;
    }
    return HEAP_NONE;
}

static void set_pages(volatile uint64_t *bitmap, uint32_t first, uint32_t pages, int allocated)
{
    for (uint32_t page = first; page < first + pages; page++) {
        uint64_t bit = 1ull << page % 64;
        bitmap[page / 64] = allocated ? bitmap[page / 64] | bit : bitmap[page / 64] & ~bit;
    }
}

static int allocate_in(struct heap *heap, uint32_t block, uint32_t pages, struct heap_run *run)
{
    volatile struct heap_block *state = heap_block(heap, block);
    volatile uint64_t *bitmap = bitmap_of(heap, block);

    if (state->run_limit < pages)
        return 0;
    uint32_t first = find_run(bitmap, pages);
    if (first == HEAP_NONE) {
        state->run_limit = (uint16_t)(pages - 1);
        return 0;
    }
    /* Pages are touched without gaps, so the first run that fits begins at or before `touched`. */
    uint32_t touched = state->touched;
    set_pages(bitmap, first, pages, 1);
    run->gpa = heap_block_address(heap, block) + first * PAGE_BYTES;
    run->pages = pages;
    run->poisoned = touched <= first ? 0 : touched - first < pages ? touched - first : pages;
    if (touched < first + pages)
        state->touched = (uint16_t)(first + pages);
    return 1;
}

void heap_split(struct heap *heap, uint32_t block)
{
    volatile uint64_t *bitmap = bitmap_of(heap, block);

    for (uint32_t word = 0; word < HEAP_BITMAP_WORDS; word++)
        bitmap[word] = 0;
    heap_block(heap, block)->run_limit = HEAP_BLOCK_PAGES;
}

int heap_allocate_newest(struct heap *heap, uint32_t pages, struct heap_run *run)
{
    uint32_t mine = LIST_SPLIT + heap->vcpu, newest = heap->header->lists[mine].head;

    return newest && is_on(heap, newest - 1, mine) && allocate_in(heap, newest - 1, pages, run);
}

int heap_allocate(struct heap *heap, uint32_t pages, struct heap_run *run)
{
    uint32_t mine = LIST_SPLIT + heap->vcpu, next = heap->header->lists[mine].head, oldest = 0;

    /* Limited by the number of blocks, because a damaged list may be circular. */
    for (uint32_t count = 0; next && count < heap->blocks && is_on(heap, next - 1, mine); count++) {
        oldest = next;
        next = heap_block(heap, next - 1)->next;
    }
    /* Allocates from the oldest block first, so that the newest blocks become empty. */
    for (uint32_t count = 0; oldest && count < heap->blocks && is_on(heap, oldest - 1, mine);
         count++) {
        if (allocate_in(heap, oldest - 1, pages, run))
            return 1;
        oldest = heap_block(heap, oldest - 1)->previous;
    }
    uint32_t block = heap_take(heap, FROM_USED | FROM_FRESH | FROM_HELD, BLOCK_SPLIT, mine);
    if (block >= heap->blocks)
        return 0;
    heap_split(heap, block);
    return allocate_in(heap, block, pages, run);
}

void heap_free(struct heap *heap, uint64_t gpa, uint32_t pages)
{
    uint32_t block = heap_block_at(heap, gpa);

    if (block == HEAP_NONE || !is_on(heap, block, LIST_SPLIT + heap->vcpu))
        return;
    uint32_t first = (uint32_t)((gpa - heap_block_address(heap, block)) / PAGE_BYTES);
    if (pages > HEAP_BLOCK_PAGES - first)
        return;
    volatile uint64_t *bitmap = bitmap_of(heap, block);
    uint64_t left = 0;
    set_pages(bitmap, first, pages, 0);
    heap_block(heap, block)->run_limit = HEAP_BLOCK_PAGES;
    for (uint32_t word = 0; word < HEAP_BITMAP_WORDS; word++)
        left |= bitmap[word];
    /* If the heap is busy, the empty block remains with this vCPU. */
    if (!left)
        (void)heap_give(heap, block);
}

/* ---- poison ---- */

void heap_poison_page(const struct heap *heap, uint64_t gpa)
{
    volatile uint64_t *page = words_at(heap->view, gpa);
    for (uint64_t index = 0; index < PAGE_WORDS; index++)
        page[index] = heap->poison;
}

void heap_check_poison(const struct heap *heap, uint64_t gpa)
{
    volatile uint64_t *page = words_at(heap->view, gpa);
    for (uint64_t index = 0; index < PAGE_WORDS; index++) {
        uint64_t found = page[index];
        if (found != heap->poison) {
            report_corruption(heap->report, gpa, heap->poison, found);
            break;
        }
    }
}
