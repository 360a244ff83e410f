/*
 * What the workloads share: where guest memory is, what pages hold, and how damage is reported.
 * Not for others: workload.h is what the machine calls.
 */
#ifndef VMFERRY_WORK_H
#define VMFERRY_WORK_H

#include "report.h"
#include "workload.h"

#define PAGE_BYTES 4096ull
#define PAGE_WORDS 512ull
#define FIRST_WORK_ADDRESS (16ull << 20) /* what lies below is the machine's */
#define HIGH_ADDRESS (4ull << 30)

/* Of one step: what writes or checks whole pages does not more of them. */
#define PAGES_PER_STEP 64

static inline uint64_t mix(uint64_t x)
{
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9ull;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

static inline volatile uint64_t *words_at(const struct guest_view *view, uint64_t gpa)
{
    uint64_t address;
    if (gpa >= HIGH_ADDRESS)
        address = view->high_base + (gpa - HIGH_ADDRESS);
    else if (gpa >= STILL_ADDRESS)
        address = view->still_base + (gpa - STILL_ADDRESS);
    else if (gpa >= DISPLAY_ADDRESS)
        address = view->display_base + (gpa - DISPLAY_ADDRESS);
    else
        address = view->low_base + gpa;
    __asm__("" : "+r"(address)); /* not a constant: GCC takes low constants for null pointers */
    return (volatile uint64_t *)address;
}

static inline volatile struct guest_report *guest_report(const struct guest_view *view)
{
    return (volatile struct guest_report *)words_at(view, REPORT_ADDRESS);
}

static inline volatile struct vcpu_report *vcpu_report(const struct guest_view *view, uint32_t vcpu)
{
    return (volatile struct vcpu_report *)words_at(view, REPORT_ADDRESS + (1 + vcpu) * PAGE_BYTES);
}

static inline uint64_t low_work_pages(const struct guest_view *view)
{
    return view->low_bytes > FIRST_WORK_ADDRESS ? (view->low_bytes - FIRST_WORK_ADDRESS) / PAGE_BYTES : 0;
}

static inline uint64_t work_pages(const struct guest_view *view)
{
    return low_work_pages(view) + view->high_bytes / PAGE_BYTES;
}

/* Guest-physical address of the workload's page `index`. */
static inline uint64_t work_address(const struct guest_view *view, uint64_t index)
{
    uint64_t low = low_work_pages(view);
    return index < low ? FIRST_WORK_ADDRESS + index * PAGE_BYTES : HIGH_ADDRESS + (index - low) * PAGE_BYTES;
}

/* Where the part of `vcpu` begins, of what all share. */
static inline uint64_t share(uint64_t pages, uint32_t vcpu, uint32_t vcpus)
{
    return pages / vcpus * vcpu + pages % vcpus * vcpu / vcpus;
}

static inline void report_corruption(volatile struct vcpu_report *report, uint64_t gpa, uint64_t expected,
                                     uint64_t found)
{
    if (report->corruptions == 0) {
        report->first.gpa = gpa;
        report->first.expected = expected;
        report->first.found = found;
        report->first.round = report->rounds;
    }
    report->corruptions++;
}

/* ---- pages whose every word is known ---- */

/* The word `index` of a page; `version` says which content the page has. */
typedef uint64_t content(uint64_t version, uint64_t gpa, uint64_t index);

static inline __attribute__((always_inline)) void write_page(const struct guest_view *view, content *word,
                                                             uint64_t version, uint64_t gpa)
{
    volatile uint64_t *page = words_at(view, gpa);
    for (uint64_t index = 0; index < PAGE_WORDS; index++)
        page[index] = word(version, gpa, index);
}

static inline __attribute__((always_inline)) void check_page(const struct guest_view *view,
                                                             volatile struct vcpu_report *report, content *word,
                                                             uint64_t version, uint64_t gpa)
{
    volatile uint64_t *page = words_at(view, gpa);
    for (uint64_t index = 0; index < PAGE_WORDS; index++) {
        uint64_t expected = word(version, gpa, index), found = page[index];
        if (found != expected) {
            report_corruption(report, gpa, expected, found);
            break;
        }
    }
    report->pages_checked++;
}

static inline uint64_t incompressible_word(uint64_t version, uint64_t gpa, uint64_t index)
{
    (void)version;
    return mix(gpa + index * 0x9e3779b97f4a7c15ull);
}

/* Generation `version`, and then words that are of it and of their address alone; 0 was never written. */
static inline uint64_t generation_word(uint64_t version, uint64_t gpa, uint64_t index)
{
    if (version == 0)
        return 0;
    return index == 0 ? version : mix(version * 0x9e3779b97f4a7c15ull ^ (gpa + index * 8));
}

/* ---- between the files of the workload ---- */

/* How many pages `rate` (pages per second over all vCPUs, 0 for no limit) allows now: at most PAGES_PER_STEP. */
uint64_t allowed_pages(volatile struct rate_credit *saved, uint64_t rate, uint32_t vcpus, uint64_t ticks);

/* Reads the command line into the report, where it is new and zero. */
void command_line_read(const struct guest_view *view, volatile struct guest_report *report);

#endif
