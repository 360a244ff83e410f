/*
 * Shared by the workloads: access to guest memory, the content of pages, and the report of
 * corruption. The machine uses workload.h only.
 */
#ifndef VMFERRY_WORK_H
#define VMFERRY_WORK_H

#include "report.h"
#include "workload.h"

#define PAGE_BYTES 4096ull
#define PAGE_WORDS 512ull
#define FIRST_WORK_ADDRESS (16ull << 20) /* the memory below is reserved for the machine */
#define HIGH_ADDRESS (4ull << 30)

/* Maximum number of pages that one step writes or checks completely. */
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
    return view->low_bytes > FIRST_WORK_ADDRESS
               ? (view->low_bytes - FIRST_WORK_ADDRESS) / PAGE_BYTES
               : 0;
}

static inline uint64_t work_pages(const struct guest_view *view)
{
    return low_work_pages(view) + view->high_bytes / PAGE_BYTES;
}

/* Guest-physical address of the workload's page `index`. */
static inline uint64_t work_address(const struct guest_view *view, uint64_t index)
{
    uint64_t low = low_work_pages(view);
    return index < low ? FIRST_WORK_ADDRESS + index * PAGE_BYTES
                       : HIGH_ADDRESS + (index - low) * PAGE_BYTES;
}

/* The first page of the share of `vcpu` in `pages`. */
static inline uint64_t share(uint64_t pages, uint32_t vcpu, uint32_t vcpus)
{
    return pages / vcpus * vcpu + pages % vcpus * vcpu / vcpus;
}

static inline void report_corruption(volatile struct vcpu_report *report, uint64_t gpa,
                                     uint64_t expected, uint64_t found)
{
    if (report->corruptions == 0) {
        report->first.gpa = gpa;
        report->first.expected = expected;
        report->first.found = found;
        report->first.round = report->rounds;
    }
    report->corruptions++;
}

/* ---- pages with known content ---- */

/* The word `index` of a page. `version` selects the content of the page. */
typedef uint64_t content(uint64_t version, uint64_t gpa, uint64_t index);

static inline __attribute__((always_inline)) void
write_page(const struct guest_view *view, content *word, uint64_t version, uint64_t gpa)
{
    volatile uint64_t *page = words_at(view, gpa);
    for (uint64_t index = 0; index < PAGE_WORDS; index++)
        page[index] = word(version, gpa, index);
}

static inline __attribute__((always_inline)) void
check_page(const struct guest_view *view, volatile struct vcpu_report *report, content *word,
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

/* The generation `version`, followed by words computed from it and their address. 0: unwritten. */
static inline uint64_t generation_word(uint64_t version, uint64_t gpa, uint64_t index)
{
    if (version == 0)
        return 0;
    return index == 0 ? version : mix(version * 0x9e3779b97f4a7c15ull ^ (gpa + index * 8));
}


/* ---- rate.c ---- */

/*
 * How many pages this vCPU may process now, at most PAGES_PER_STEP. `rate` is in pages per second
 * over all vCPUs, 0 for no limit.
 */
uint64_t allowed_pages(volatile struct rate_credit *saved, uint64_t rate, uint32_t vcpus,
                       uint64_t ticks);

/* ---- command_line.c ---- */

/* Parses the command line into a report that is zero. */
void command_line_read(const struct guest_view *view, volatile struct guest_report *report);

#endif
