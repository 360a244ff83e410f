/* Limits a workload to its rate. See work.h. */
#include "work.h"

#define MAX_CREDITED_TICKS 20 /* time lost by a pause or a slow phase is not made up */

uint64_t allowed_pages(volatile struct rate_credit *saved, uint64_t rate, uint32_t vcpus,
                       uint64_t ticks)
{
    if (!rate)
        return PAGES_PER_STEP;
    uint64_t passed = ticks - saved->credited_ticks, cost = 1000ull * vcpus;
    saved->credited_ticks = ticks;
    uint64_t credit = saved->credit + passed * rate;
    uint64_t limit = MAX_CREDITED_TICKS * rate + cost; /* a slow rate can save up for one page */
    credit = credit < limit ? credit : limit;
    uint64_t pages = credit / cost;
    pages = pages < PAGES_PER_STEP ? pages : PAGES_PER_STEP;
    saved->credit = credit - pages * cost;
    return pages;
}
