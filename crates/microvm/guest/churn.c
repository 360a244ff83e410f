/* The workloads of the heap. See churn.h. */
#include "churn.h"

#include "heap.h"
#include "work.h"

#define POPULATED_PAGES_PER_STEP 16
#define REWRITTEN_PAGES 64 /* at most, at a time */

/* The context of a step. */
struct churn {
    struct heap heap;
    volatile struct churn_state *state;
    volatile struct churn_buffer *buffers;
    volatile struct vcpu_report *report;
    uint64_t share; /* maximum pages in live buffers of this vCPU */
    uint64_t ticks;
    uint32_t flags;
};

static volatile struct churn_state *churn_state(const struct guest_view *view, uint32_t vcpu)
{
    return (volatile struct churn_state *)words_at(view, CHURN_ADDRESS + vcpu * PAGE_BYTES);
}

void churn_init(const struct guest_view *view)
{
    volatile struct guest_report *guest = guest_report(view);
    struct heap heap;

    if (!heap_open(&heap, view, 0))
        return;
    uint64_t pages = (uint64_t)heap.blocks * HEAP_BLOCK_PAGES;
    if (guest->freed_pages > pages)
        guest->freed_pages = pages;
    if (guest->churn_pages > pages)
        guest->churn_pages = pages;
}

/* Returns 0 if there is nothing to do, or if the state is damaged. */
static int churn_open(struct churn *churn, const struct guest_view *view, uint32_t vcpu)
{
    volatile struct guest_report *guest = guest_report(view);
    uint32_t vcpus = guest->vcpus;

    if (!guest->churn_pages && !guest->freed_pages)
        return 0;
    if (!heap_open(&churn->heap, view, vcpu))
        return 0;
    churn->state = churn_state(view, vcpu);
    churn->buffers = (volatile struct churn_buffer *)words_at(
        view, CHURN_BUFFERS_ADDRESS + vcpu * CHURN_BUFFERS * sizeof(struct churn_buffer));
    churn->report = churn->heap.report;
    churn->flags = guest->flags;
    churn->share =
        share(guest->churn_pages, vcpu + 1, vcpus) - share(guest->churn_pages, vcpu, vcpus);
    if (guest->churn_pages > (uint64_t)churn->heap.blocks * HEAP_BLOCK_PAGES) {
        report_corruption(churn->report, REPORT_ADDRESS, churn->heap.blocks, guest->churn_pages);
        return 0;
    }
    uint32_t slots = churn->state->slots;
    if (slots > CHURN_BUFFERS || churn->state->lowest > slots || churn->state->cursor > slots) {
        report_corruption(churn->report, CHURN_ADDRESS + vcpu * PAGE_BYTES, CHURN_BUFFERS, slots);
        return 0;
    }
    return 1;
}

/* ---- freed ---- */

/* Writes or poisons one page of this vCPU's share of `freed`. Returns 0 when all are done. */
static int free_page(struct churn *churn, uint64_t blocks)
{
    volatile struct churn_state *state = churn->state;
    struct heap *heap = &churn->heap;

    if (!state->freed_block) {
        if (state->freed_blocks >= blocks)
            return 0;
        uint32_t block = heap_take(heap, FROM_FRESH, BLOCK_WHOLE, LIST_NONE);
        if (block == HEAP_BUSY)
            return 1;
        if (block == HEAP_NONE) {
            state->freed_blocks = blocks; /* the whole heap has been written */
            return 0;
        }
        state->freed_block = block + 1;
        state->freed_next = 0;
    }
    uint32_t block = state->freed_block - 1, page = state->freed_next;
    int poison = (churn->flags & FLAG_POISON) != 0;
    if (block >= heap->blocks || page > 2 * HEAP_BLOCK_PAGES) {
        report_corruption(churn->report, CHURN_ADDRESS + heap->vcpu * PAGE_BYTES, heap->blocks,
                          block);
        return 0;
    }
    uint64_t gpa = heap_block_address(heap, block) + page % HEAP_BLOCK_PAGES * PAGE_BYTES;
    if (page < HEAP_BLOCK_PAGES) {
        write_page(heap->view, incompressible_word, 0, gpa);
        churn->report->pages_written++;
    } else if (poison && page < 2 * HEAP_BLOCK_PAGES) {
        heap_poison_page(heap, gpa);
    } else {
        heap_block(heap, block)->touched = HEAP_BLOCK_PAGES;
        if (!heap_give(heap, block))
            return 1;
        state->freed_block = 0;
        state->freed_blocks++;
        return 1;
    }
    state->freed_next = page + 1;
    return 1;
}

/* ---- buffers ---- */

static uint64_t random(struct churn *churn)
{
    uint64_t next = churn->state->random + 0x9e3779b97f4a7c15ull;
    churn->state->random = next;
    return mix(next ^ (uint64_t)churn->heap.vcpu << 56);
}

/*
 * Reads the buffer in a slot. Returns its address, or 0 if there is none. A damaged entry is
 * reported and removed.
 */
static uint64_t buffer_address(struct churn *churn, uint32_t slot, struct churn_buffer *buffer)
{
    volatile struct churn_buffer *from = &churn->buffers[slot];

    buffer->page = from->page;
    buffer->pages = from->pages;
    buffer->rewritten = from->rewritten;
    buffer->generation = from->generation;
    if (!buffer->pages)
        return 0;
    uint64_t gpa = buffer->page * PAGE_BYTES;
    uint32_t block = heap_block_at(&churn->heap, gpa);
    if (block != HEAP_NONE && buffer->rewritten < buffer->pages) {
        uint64_t end = heap_block_address(&churn->heap, block) + HEAP_BLOCK_BYTES;
        if (buffer->pages <= HEAP_BLOCK_PAGES && buffer->pages * PAGE_BYTES <= end - gpa)
            return gpa;
    }
    report_corruption(churn->report, CHURN_BUFFERS_ADDRESS, HEAP_BLOCK_PAGES, buffer->pages);
    from->pages = 0;
    return 0;
}

static uint64_t generation_of(const struct churn_buffer *buffer, uint32_t page)
{
    return buffer->generation + (page < buffer->rewritten);
}

static void begin(struct churn *churn, enum churn_job job, uint32_t slot, uint32_t next,
                  uint32_t end)
{
    churn->state->job = (uint32_t)job;
    churn->state->slot = slot;
    churn->state->next = next;
    churn->state->end = end;
}

/* Begins to check the next buffer of this round. Returns 0 at the end of the round. */
static int begin_check(struct churn *churn)
{
    volatile struct churn_state *state = churn->state;
    struct churn_buffer buffer;

    for (uint32_t slots = state->slots; state->cursor < slots;) {
        uint32_t slot = state->cursor++;
        if (buffer_address(churn, slot, &buffer)) {
            begin(churn, JOB_CHECK, slot, 0, buffer.pages);
            return 1;
        }
    }
    state->cursor = 0;
    churn->report->churn_rounds++;
    return 0;
}

/* Picks a random buffer, or CHURN_BUFFERS if there is none. */
static uint32_t pick(struct churn *churn, struct churn_buffer *buffer)
{
    uint32_t slots = churn->state->slots, slot = slots ? (uint32_t)(random(churn) % slots) : 0;

    for (uint32_t count = 0; count < slots; count++, slot = slot + 1 < slots ? slot + 1 : 0) {
        if (buffer_address(churn, slot, buffer))
            return slot;
    }
    return CHURN_BUFFERS;
}

static int begin_rewrite(struct churn *churn)
{
    struct churn_buffer buffer;
    uint32_t slot = pick(churn, &buffer);

    if (slot == CHURN_BUFFERS)
        return 0;
    uint32_t left = buffer.pages - buffer.rewritten,
             pages = left < REWRITTEN_PAGES ? left : REWRITTEN_PAGES;
    begin(churn, JOB_REWRITE, slot, buffer.rewritten, buffer.rewritten + 1 + random(churn) % pages);
    return 1;
}

/* Picks the oldest buffer, or CHURN_BUFFERS if there is none. */
static uint32_t pick_oldest(struct churn *churn, struct churn_buffer *buffer)
{
    uint64_t oldest = ~0ull;
    uint32_t found = CHURN_BUFFERS;

    for (uint32_t slot = 0; slot < churn->state->slots; slot++) {
        volatile struct churn_buffer *kept = &churn->buffers[slot];
        if (kept->pages && kept->generation < oldest) {
            oldest = kept->generation;
            found = slot;
        }
    }
    return found != CHURN_BUFFERS && buffer_address(churn, found, buffer) ? found : CHURN_BUFFERS;
}

/* Mostly the oldest buffer, as memory of a program is freed together. One in eight is random. */
static int begin_release(struct churn *churn)
{
    struct churn_buffer buffer;
    uint32_t slot = random(churn) % 8 ? pick_oldest(churn, &buffer) : CHURN_BUFFERS;

    if (slot == CHURN_BUFFERS)
        slot = pick(churn, &buffer);

    if (slot == CHURN_BUFFERS)
        return 0;
    begin(churn, JOB_RELEASE, slot, 0, buffer.pages);
    return 1;
}

/* Finds an empty slot, or CHURN_BUFFERS if there is none. */
static uint32_t find_slot(struct churn *churn)
{
    volatile struct churn_state *state = churn->state;
    uint32_t slot = state->lowest;

    while (slot < state->slots && churn->buffers[slot].pages)
        slot++;
    state->lowest = slot;
    if (slot == state->slots && slot < CHURN_BUFFERS)
        state->slots = slot + 1;
    return slot;
}

/* Sizes are distributed evenly over the powers of two: 48 pages on average. */
static uint32_t choose_size(struct churn *churn)
{
    uint64_t number = random(churn);
    uint32_t least = 1u << number % 8;
    return least + (uint32_t)(number >> 8) % least + (uint32_t)(number >> 40) % 2;
}

static int begin_buffer(struct churn *churn, uint64_t room)
{
    volatile struct churn_state *state = churn->state;
    uint32_t slot = find_slot(churn), pages = choose_size(churn);
    struct heap_run run;

    if (slot == CHURN_BUFFERS || !room)
        return 0;
    if (pages > room)
        pages = (uint32_t)room;
    int newest = state->pressed && heap_allocate_newest(&churn->heap, pages, &run);
    state->pressed = 0;
    while (!newest && !heap_allocate(&churn->heap, pages, &run)) {
        if (pages == 1)
            return 0;
        pages /= 2;
    }
    volatile struct churn_buffer *buffer = &churn->buffers[slot];
    buffer->page = (uint32_t)(run.gpa / PAGE_BYTES);
    buffer->rewritten = 0;
    /* Unique for each buffer, however often it is rewritten. */
    buffer->generation = ++state->buffers_made << 24 | churn->heap.vcpu << 20;
    buffer->pages = (uint16_t)pages;
    state->live_pages += pages;
    state->poisoned = churn->flags & FLAG_POISON ? run.poisoned : 0;
    churn->report->buffers_allocated++;
    begin(churn, JOB_WRITE, slot, 0, pages);
    return 1;
}

/* Takes blocks that the balloon driver holds, as the shrinker of a guest under memory pressure. */
static void press(struct churn *churn)
{
    struct heap *heap = &churn->heap;

    if (!(churn->flags & FLAG_PRESSURE) ||
        churn->ticks - churn->state->pressed_ticks < PRESSURE_TICKS)
        return;
    churn->state->pressed_ticks = churn->ticks;
    for (unsigned count = 0; count < PRESSURE_BLOCKS; count++) {
        uint32_t block = heap_take(heap, FROM_HELD, BLOCK_SPLIT, LIST_SPLIT + heap->vcpu);
        if (block >= heap->blocks)
            return;
        heap_split(heap, block);
        churn->state->pressed = 1;
    }
}

static int choose_job(struct churn *churn)
{
    volatile struct churn_state *state = churn->state;
    uint64_t choice = random(churn), live = state->live_pages;

    press(churn);
    if (state->pressed && begin_buffer(churn, HEAP_BLOCK_PAGES))
        return 1;
    if (live >= churn->share)
        state->shrinking = 1;
    else if (live <= churn->share * 7 / 10)
        state->shrinking = 0;
    if (choice % 16 < 8)
        return begin_check(churn) || begin_check(churn);
    if (choice % 16 < 10)
        return begin_rewrite(churn);
    int grow = (choice >> 8) % 4 != 0; /* one in four is the opposite */
    if (state->shrinking)
        grow = !grow;
    grow |= live <= churn->share * 7 / 10;
    if (grow && live < churn->share && begin_buffer(churn, churn->share - live))
        return 1;
    return begin_release(churn);
}

/* ---- a job's pages ---- */

static void rewrite_page(struct churn *churn, const struct churn_buffer *buffer, uint64_t gpa)
{
    volatile struct churn_buffer *kept = &churn->buffers[churn->state->slot];

    check_page(churn->heap.view, churn->report, generation_word, buffer->generation, gpa);
    write_page(churn->heap.view, generation_word, buffer->generation + 1, gpa);
    churn->report->pages_written++;
    if (buffer->rewritten + 1 < buffer->pages) {
        kept->rewritten = (uint16_t)(buffer->rewritten + 1);
    } else {
        kept->generation = buffer->generation + 1;
        kept->rewritten = 0;
    }
}

static void end_job(struct churn *churn, uint64_t gpa, const struct churn_buffer *buffer)
{
    volatile struct churn_state *state = churn->state;

    if (state->job == JOB_RELEASE) {
        uint32_t slot = state->slot;
        churn->buffers[slot].pages = 0;
        if (slot < state->lowest)
            state->lowest = slot;
        state->live_pages -= buffer->pages;
        heap_free(&churn->heap, gpa, buffer->pages);
        churn->report->buffers_freed++;
    }
    state->job = JOB_NONE;
}

/* Processes one page of the current job. */
static void work_on_page(struct churn *churn)
{
    volatile struct churn_state *state = churn->state;
    struct heap *heap = &churn->heap;
    struct churn_buffer buffer;
    uint32_t slot = state->slot, page = state->next, end = state->end, job = state->job;
    uint64_t first = slot < CHURN_BUFFERS ? buffer_address(churn, slot, &buffer) : 0;

    if (!first || page >= end || end > buffer.pages || job > JOB_RELEASE ||
        (job == JOB_REWRITE && page != buffer.rewritten)) {
        report_corruption(churn->report, CHURN_ADDRESS + heap->vcpu * PAGE_BYTES, end, page);
        state->job = JOB_NONE;
        return;
    }
    uint64_t gpa = first + page * PAGE_BYTES;
    if (job == JOB_WRITE) {
        if (page < state->poisoned)
            heap_check_poison(heap, gpa);
        write_page(heap->view, generation_word, buffer.generation, gpa);
        churn->report->pages_written++;
    } else if (job == JOB_REWRITE) {
        rewrite_page(churn, &buffer, gpa);
    } else {
        check_page(heap->view, churn->report, generation_word, generation_of(&buffer, page), gpa);
        if (job == JOB_RELEASE && churn->flags & FLAG_POISON)
            heap_poison_page(heap, gpa);
    }
    churn->report->churn_work++;
    state->next = page + 1;
    if (page + 1 == end)
        end_job(churn, first, &buffer);
}

/* ---- steps ---- */

int churn_populate(const struct guest_view *view, uint32_t vcpu)
{
    volatile struct guest_report *guest = guest_report(view);
    struct churn churn;

    if (!churn_open(&churn, view, vcpu))
        return 0;
    uint64_t blocks = (guest->freed_pages + HEAP_BLOCK_PAGES - 1) / HEAP_BLOCK_PAGES;
    blocks = share(blocks, vcpu + 1, guest->vcpus) - share(blocks, vcpu, guest->vcpus);
    for (unsigned count = 0; count < POPULATED_PAGES_PER_STEP; count++) {
        if (free_page(&churn, blocks))
            continue;
        if (churn.state->job == JOB_NONE) {
            uint64_t live = churn.state->live_pages;
            if (live >= churn.share || !begin_buffer(&churn, churn.share - live))
                return 0;
        }
        work_on_page(&churn);
    }
    return 1;
}

int churn_step(const struct guest_view *view, uint32_t vcpu, uint64_t ticks)
{
    volatile struct guest_report *guest = guest_report(view);
    struct churn churn;

    if (!guest->churn_pages || !churn_open(&churn, view, vcpu) || !churn.share)
        return 0;
    churn.ticks = ticks;
    uint64_t allowed = allowed_pages(&churn.state->credit, guest->churn_rate, guest->vcpus, ticks);
    for (uint64_t count = 0; count < allowed; count++) {
        if (churn.state->job == JOB_NONE && !choose_job(&churn))
            return 0; /* not even one page is available */
        work_on_page(&churn);
    }
    return allowed == PAGES_PER_STEP;
}
