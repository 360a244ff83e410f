/*
 * The workloads and their checks. See workload.h.
 *
 * A hot page of generation g contains {g, hash(g ^ address)} in its first and last two words, and
 * the hash in a word between them, whose index depends on g. Each round visits each page once, and
 * the page must contain exactly the generation of the previous round. So stale pages and swapped
 * pages are detected, which a hash of the content alone would accept.
 */
#include "work.h"

#include "churn.h"
#include "heap.h"

#define FILL_PAGES_PER_STEP 8
#define CHECKED_PAGES_PER_STEP 8      /* of `fill`, in an idle guest: 31 MiB/s */
#define CHECKED_PAGES_PER_BUSY_STEP 2 /* more would slow down the writes */
#define READ_PAGES_PER_STEP 32


/* ---- fill and read: content that never changes ---- */

#define TEXT "the guest goes on where it was, and nobody has noticed that it moved; "
static const char text[] =
    TEXT TEXT; /* twice, so that eight bytes follow every offset in the first */

static uint64_t fill_word(uint64_t kind, uint64_t gpa, uint64_t index)
{
    if (kind == FILL_ZERO)
        return 0;
    if (kind == FILL_INCOMPRESSIBLE)
        return incompressible_word(kind, gpa, index);
    /* Eight bytes of the text. The offset changes every 64 bytes. */
    uint64_t start = mix(gpa / PAGE_BYTES * 64 + index / 8) + index % 8 * 8;
    uint64_t word;
    __builtin_memcpy(&word, text + start % (sizeof TEXT - 1), sizeof word);
    return word;
}

static void fill_page(const struct guest_view *view, uint32_t kind, uint64_t gpa)
{
    write_page(view, fill_word, kind, gpa);
}

static void check_fill_page(const struct guest_view *view, volatile struct vcpu_report *report,
                            uint32_t kind, uint64_t gpa)
{
    check_page(view, report, fill_word, kind, gpa);
}

/* ---- hot: pages that are rewritten ---- */

static uint64_t page_hash(uint64_t generation, uint64_t gpa)
{
    return mix(generation ^ gpa);
}

static uint64_t middle_word(uint64_t generation)
{
    return 2 + mix(generation) % (PAGE_WORDS - 4);
}

/* Whether the word is as expected. If not, the page is reported. */
static int is_word(volatile struct vcpu_report *report, uint64_t gpa, volatile uint64_t *page,
                   uint64_t index, uint64_t expected)
{
    uint64_t found = page[index];
    if (found != expected)
        report_corruption(report, gpa, expected, found);
    return found == expected;
}

static void visit_hot_page(const struct guest_view *view, volatile struct vcpu_report *report,
                           uint64_t gpa)
{
    volatile uint64_t *page = words_at(view, gpa);
    uint64_t expected = report->rounds;
    uint64_t hash = expected ? page_hash(expected, gpa) : 0; /* generation 0: unwritten */

    (void)(is_word(report, gpa, page, 0, expected) && is_word(report, gpa, page, 510, expected) &&
           is_word(report, gpa, page, 1, hash) && is_word(report, gpa, page, 511, hash) &&
           is_word(report, gpa, page, middle_word(expected), hash));
    uint64_t next = expected + 1;
    hash = page_hash(next, gpa);
    page[0] = next;
    page[1] = hash;
    page[middle_word(next)] = hash;
    page[510] = next;
    page[511] = hash;
    report->pages_checked++;
    report->pages_written++;
}

static uint64_t common_divisor(uint64_t a, uint64_t b)
{
    while (b) {
        uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* The order of a round: `offset + position * stride`, which visits each page once. */
static void choose_order(volatile struct vcpu_report *report, uint32_t random, uint32_t vcpu,
                         uint64_t pages)
{
    uint64_t seed = mix(report->rounds * 8 + vcpu + 1);
    uint64_t stride = random ? 1 + seed % pages : 1;
    while (common_divisor(stride, pages) != 1)
        stride++;
    report->stride = stride;
    report->offset = random ? mix(seed) % pages : 0;
}

static void hot_step(const struct guest_view *view, volatile struct vcpu_report *report,
                     uint32_t vcpu, uint64_t first, uint64_t pages, uint64_t count)
{
    for (; count; count--) {
        if (!report->stride)
            choose_order(report, guest_report(view)->random, vcpu, pages);
        /* Both factors are below the number of pages, so the product fits into 64 bits. */
        uint64_t index = (report->offset + report->hot_next * report->stride) % pages;
        visit_hot_page(view, report, work_address(view, first + index));
        if (++report->hot_next >= pages) {
            report->hot_next = 0;
            report->stride = 0;
            report->rounds++;
        }
    }
}


/* ---- display: a frame buffer, and a slot that never changes ---- */

/* Number of pages of the frame buffer: 0 unless both slots exist. */
static uint32_t display_pages(const struct guest_view *view)
{
    return view->display_base && view->still_base ? DISPLAY_PAGES : 0;
}

static uint64_t display_page(uint64_t index)
{
    return DISPLAY_ADDRESS + index * PAGE_BYTES;
}

static uint64_t still_page(uint64_t index)
{
    return STILL_ADDRESS + index * PAGE_BYTES;
}

/*
 * Draws the next frame if one is due: 60 in any 1000 consecutive ticks. Before that, it checks the
 * content of both slots.
 */
static void display_step(const struct guest_view *view, volatile struct vcpu_report *report,
                         uint64_t ticks)
{
    uint64_t frame = report->frames, due = ticks * FRAMES_PER_SECOND / 1000;

    if (report->frames_due > due) /* ticks never go back */
        report_corruption(report, REPORT_ADDRESS + PAGE_BYTES, due, report->frames_due);
    else if (frame && report->frames_due == due)
        return;
    report->frames_due = due;
    for (uint64_t index = 0; index < DISPLAY_PAGES; index++) {
        check_page(view, report, generation_word, frame, display_page(index));
        if (frame) {
            check_page(view, report, fill_word, FILL_INCOMPRESSIBLE, still_page(index));
        } else {
            write_page(view, fill_word, FILL_INCOMPRESSIBLE, still_page(index));
            report->pages_written++;
        }
    }
    for (uint64_t index = 0; index < DISPLAY_PAGES; index++) {
        write_page(view, generation_word, frame + 1, display_page(index));
        report->pages_written++;
    }
    report->frames = frame + 1;
}

/* ---- heartbeat: pages that the VMM's device writes ---- */

/*
 * The device writes sequence, hash, sequence. They are read in reverse order, so if both sequences
 * are equal, the hash belongs to them. A page must never be older than at the last check.
 */
static void check_heartbeat(const struct guest_view *view, volatile struct vcpu_report *report,
                            uint64_t slot)
{
    uint64_t gpa = HEARTBEAT_ADDRESS + slot * PAGE_BYTES;
    volatile uint64_t *page = words_at(view, gpa);
    uint64_t end = page[2], hash = page[1], begin = page[0];

    if (begin != end)
        return; /* the device is writing the page */
    if ((begin && hash != page_hash(begin, gpa)) || begin < report->seen[slot]) {
        report_corruption(report, gpa, report->seen[slot], begin);
    } else if (begin > report->seen[slot]) {
        report->seen[slot] = begin;
        report->heartbeats++;
    }
}

/* ---- a step ---- */

static uint64_t read_tsc(void)
{
    uint32_t low, high;
    __asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
    return (uint64_t)high << 32 | low;
}

static void note_time(volatile struct vcpu_report *report, uint64_t ticks)
{
    uint64_t now = read_tsc(), last = report->last_tsc;
    if (last && now > last && now - last > report->longest_gap_tsc)
        report->longest_gap_tsc = now - last;
    report->last_tsc = now;
    report->ticks = ticks;
}

/* The share of one vCPU, as indices of pages. */
struct work {
    uint64_t fill_first, fill_pages;
    uint64_t read_first, read_pages;
    uint64_t hot_first, hot_pages;
    int has_display; /* 1 on vCPU 0, which draws the display */
};

/*
 * Finds the vCPU's share. Returns 0 if the report is damaged. Guest memory may come from another
 * host, and in the process guest an address outside guest memory is memory of the VMM.
 */
static int find_work(const struct guest_view *view, volatile struct vcpu_report *report,
                     uint32_t vcpu, struct work *work)
{
    volatile struct guest_report *guest = guest_report(view);
    uint64_t fill = guest->fill_pages, read = guest->read_pages, hot = guest->hot_pages;
    uint64_t pages = work_pages(view);
    uint32_t vcpus = guest->vcpus, populating = report->phase == PHASE_POPULATING;

    if (vcpus > REPORT_MAX_VCPUS) {
        report_corruption(report, REPORT_ADDRESS, REPORT_MAX_VCPUS, vcpus);
        return 0;
    }
    if (fill > pages || read > pages - fill || hot > pages - fill - read) {
        report_corruption(report, REPORT_ADDRESS, pages,
                          fill > pages          ? fill
                          : read > pages - fill ? read
                                                : hot);
        return 0;
    }
    uint64_t display = guest->display_pages;
    if (display && display != display_pages(view)) {
        report_corruption(report, REPORT_ADDRESS, display_pages(view), display);
        return 0;
    }
    work->has_display = display && vcpu == 0;
    work->fill_first = share(fill, vcpu, vcpus);
    work->fill_pages = share(fill, vcpu + 1, vcpus) - work->fill_first;
    work->read_first = fill + share(read, vcpu, vcpus);
    work->read_pages = fill + share(read, vcpu + 1, vcpus) - work->read_first;
    work->hot_first = fill + read + share(hot, vcpu, vcpus);
    work->hot_pages = fill + read + share(hot, vcpu + 1, vcpus) - work->hot_first;
    uint64_t fill_end = work->fill_pages + (populating || !work->fill_pages);
    uint64_t read_end = work->read_pages + (populating || !work->read_pages);
    if (report->fill_next >= fill_end || report->read_next >= read_end ||
        report->hot_next > work->hot_pages) {
        report_corruption(report, REPORT_ADDRESS + (1 + vcpu) * PAGE_BYTES, work->fill_pages,
                          report->fill_next);
        return 0;
    }
    return 1;
}

/*
 * Populates the guest: fills pages, visits all hot pages once without a rate limit, and populates
 * the heap's workloads.
 */
static void populate_step(const struct guest_view *view, volatile struct vcpu_report *report,
                          uint32_t vcpu, const struct work *work)
{
    uint32_t kind = guest_report(view)->fill_kind;

    if (report->fill_next < work->fill_pages) {
        for (unsigned count = 0;
             count < FILL_PAGES_PER_STEP && report->fill_next < work->fill_pages; count++) {
            fill_page(view, kind, work_address(view, work->fill_first + report->fill_next++));
            report->pages_written++;
        }
    } else if (report->read_next < work->read_pages) {
        for (unsigned count = 0;
             count < FILL_PAGES_PER_STEP && report->read_next < work->read_pages; count++) {
            fill_page(view, FILL_INCOMPRESSIBLE,
                      work_address(view, work->read_first + report->read_next++));
            report->pages_written++;
        }
    } else if (work->hot_pages && report->rounds == 0) {
        hot_step(view, report, vcpu, work->hot_first, work->hot_pages, PAGES_PER_STEP);
    } else if (!churn_populate(view, vcpu)) {
        report->fill_next = 0;
        report->read_next = 0;
        report->phase = PHASE_RUNNING;
    }
}

static void check_fill_step(const struct guest_view *view, volatile struct vcpu_report *report,
                            const struct work *work, uint64_t count)
{
    uint32_t kind = guest_report(view)->fill_kind;

    for (; count && work->fill_pages; count--) {
        check_fill_page(view, report, kind,
                        work_address(view, work->fill_first + report->fill_next));
        if (++report->fill_next == work->fill_pages) {
            report->fill_next = 0;
            report->fill_rounds++;
            break;
        }
    }
}

static void read_step(const struct guest_view *view, volatile struct vcpu_report *report,
                      const struct work *work)
{
    for (unsigned count = 0; count < READ_PAGES_PER_STEP && work->read_pages; count++) {
        check_fill_page(view, report, FILL_INCOMPRESSIBLE,
                        work_address(view, work->read_first + report->read_next));
        if (++report->read_next == work->read_pages) {
            report->read_next = 0;
            report->read_rounds++;
            break;
        }
    }
}

int workload_step(const struct guest_view *view, uint32_t vcpu, uint64_t ticks)
{
    volatile struct guest_report *guest = guest_report(view);
    volatile struct vcpu_report *report = vcpu_report(view, vcpu);
    struct work work;

    if (vcpu >= guest->vcpus)
        return 1;
    note_time(report, ticks);
    if (vcpu == 0)
        check_heartbeat(view, report, ticks % HEARTBEAT_PAGES);
    if (!find_work(view, report, vcpu, &work))
        return 1;
    if (work.has_display)
        display_step(view, report, ticks);
    if (report->phase == PHASE_POPULATING) {
        populate_step(view, report, vcpu, &work);
        return 0;
    }
    uint64_t allowed =
        work.hot_pages ? allowed_pages(&report->hot_credit, guest->rate, guest->vcpus, ticks) : 0;
    hot_step(view, report, vcpu, work.hot_first, work.hot_pages, allowed);
    int busy = allowed == PAGES_PER_STEP;
    check_fill_step(view, report, &work,
                    busy ? CHECKED_PAGES_PER_BUSY_STEP : CHECKED_PAGES_PER_STEP);
    read_step(view, report, &work);
    busy |= churn_step(view, vcpu, ticks);
    return !busy && !work.read_pages;
}

void workload_init(const struct guest_view *view, uint32_t vcpus)
{
    volatile struct guest_report *report = guest_report(view);

    report->vcpus = vcpus < REPORT_MAX_VCPUS ? vcpus : REPORT_MAX_VCPUS;
    command_line_read(view, report);
    uint64_t pages = work_pages(view);
    if (report->fill_pages > pages)
        report->fill_pages = pages;
    pages -= report->fill_pages;
    if (report->read_pages > pages)
        report->read_pages = pages;
    pages -= report->read_pages;
    if (report->hot_pages > pages)
        report->hot_pages = pages;
    heap_init(view);
    churn_init(view);
    report->version = REPORT_VERSION;
    report->magic = REPORT_MAGIC;
}
