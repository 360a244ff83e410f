/*
 * Parses the command line: words separated by spaces (workload.h). The VMM has checked it. Invalid
 * words are ignored.
 */
#include "work.h"

#define COMMAND_LINE_ADDRESS 0x7000

static volatile const char *read_number(volatile const char *at, uint64_t *number)
{
    for (*number = 0; *at >= '0' && *at <= '9'; at++)
        *number = *number * 10 + (uint64_t)(*at - '0');
    return at;
}

/* The text after `word`, or null if the text does not begin with it. */
static volatile const char *skip(volatile const char *at, const char *word)
{
    for (; *word; word++, at++) {
        if (*at != *word)
            return 0;
    }
    return at;
}

static volatile const char *read_fill(volatile const char *at, volatile struct guest_report *report)
{
    static const char *const kinds[] = {",incompressible", ",text", ",zero"};
    uint64_t mib;

    at = read_number(at, &mib);
    report->fill_pages = mib << 8;
    for (uint32_t kind = 0; kind < 3; kind++) {
        volatile const char *after = skip(at, kinds[kind]);
        if (after) {
            report->fill_kind = kind;
            return after;
        }
    }
    return at;
}

static volatile const char *read_hot(volatile const char *at, volatile struct guest_report *report)
{
    volatile const char *after;
    uint64_t number;

    at = read_number(at, &number);
    report->hot_pages = number << 8;
    for (;;) {
        if ((after = skip(at, ",rate="))) {
            at = read_number(after, &number);
            report->rate = number;
        } else if ((after = skip(at, ",random"))) {
            report->random = 1;
            at = after;
        } else if ((after = skip(at, ",sequential"))) {
            report->random = 0;
            at = after;
        } else {
            return at;
        }
    }
}

static volatile const char *read_read(volatile const char *at, volatile struct guest_report *report)
{
    uint64_t mib;

    at = read_number(at, &mib);
    report->read_pages = mib << 8;
    return at;
}

static volatile const char *read_churn(volatile const char *at,
                                       volatile struct guest_report *report)
{
    volatile const char *after;
    uint64_t number;

    at = read_number(at, &number);
    report->churn_pages = number << 8;
    if ((after = skip(at, ",rate="))) {
        at = read_number(after, &number);
        report->churn_rate = number;
    }
    return at;
}

static volatile const char *read_freed(volatile const char *at,
                                       volatile struct guest_report *report)
{
    uint64_t mib;

    at = read_number(at, &mib);
    report->freed_pages = mib << 8;
    return at;
}

/* The text after a word without parameters, or null if there is none. */
static volatile const char *read_flag(volatile const char *at, volatile struct guest_report *report)
{
    static const char *const words[] = {"poison", "pressure", "reporting", "rewrite"}; /* by bit */

    for (uint32_t flag = 0; flag < 4; flag++) {
        volatile const char *after = skip(at, words[flag]);
        if (after) {
            report->flags |= 1u << flag;
            return after;
        }
    }
    volatile const char *after = skip(at, "init-on-free");
    if (after)
        report->flags |= FLAG_POISON | FLAG_ZERO_FREED;
    return after;
}

static volatile const char *read_lie(volatile const char *at, volatile struct guest_report *report)
{
    static const char *const kinds[] = {"outside", "overlap", "used",  "endless",
                                        "never",   "id",      "chain", "unmap"};

    for (uint32_t kind = LIE_OUTSIDE; kind < LIE_COUNT; kind++) {
        volatile const char *after = skip(at, kinds[kind - LIE_OUTSIDE]);
        if (after) {
            report->flags |= kind << LIE_SHIFT;
            return after;
        }
    }
    return at;
}

void command_line_read(const struct guest_view *view, volatile struct guest_report *report)
{
    volatile const char *at = (volatile const char *)words_at(view, COMMAND_LINE_ADDRESS);
    volatile const char *after;

    while (*at) {
        if ((after = skip(at, "fill="))) {
            at = read_fill(after, report);
        } else if ((after = skip(at, "read="))) {
            at = read_read(after, report);
        } else if ((after = skip(at, "hot="))) {
            at = read_hot(after, report);
        } else if ((after = skip(at, "churn="))) {
            at = read_churn(after, report);
        } else if ((after = skip(at, "freed="))) {
            at = read_freed(after, report);
        } else if ((after = skip(at, "lie="))) {
            at = read_lie(after, report);
        } else if ((after = skip(at, "display"))) {
            report->display_pages = view->display_base && view->still_base ? DISPLAY_PAGES : 0;
            at = after;
        } else if ((after = read_flag(at, report))) {
            at = after;
        } else {
            at++;
        }
    }
}
