/* The report as a line of text. See serial_report.h. */
#include "serial_report.h"

#include "machine.h"
#include "network.h"
#include "paravirt.h"
#include "work.h"

#define SERIAL_PORT 0x3f8
#define PERIOD_TICKS 100
#define BYTES_AT_ONCE 16 /* with interrupts off; each byte causes an exit */

static uint64_t due; /* ticks */
static char line[1024];
static unsigned length;

static void add_text(const char *text)
{
    for (; *text && length < sizeof line; text++)
        line[length++] = *text;
}

static void add(const char *name, uint64_t value)
{
    char digits[21];
    unsigned first = sizeof digits - 1;

    digits[first] = 0;
    do {
        digits[--first] = (char)('0' + value % 10);
        value /= 10;
    } while (value);
    add_text(name);
    add_text(digits + first);
}

static void add_memory(const struct guest_view *view, uint32_t vcpus)
{
    uint64_t rounds = ~0ull, fill_rounds = ~0ull, checked = 0, corruptions = 0, ticks = ~0ull;
    volatile struct corruption *first = 0;

    for (uint32_t vcpu = 0; vcpu < vcpus; vcpu++) {
        volatile struct vcpu_report *report = vcpu_report(view, vcpu);
        rounds = report->rounds < rounds ? report->rounds : rounds;
        fill_rounds = report->fill_rounds < fill_rounds ? report->fill_rounds : fill_rounds;
        ticks = report->ticks < ticks ? report->ticks : ticks;
        checked += report->pages_checked;
        corruptions += report->corruptions;
        if (report->corruptions && !first)
            first = &report->first;
    }
    add(" rounds=", rounds);
    add(" static_rounds=", fill_rounds);
    add(" checked=", checked);
    add(" corruptions=", corruptions);
    add(" uptime_us=", ticks * 1000);
    add(" vcpus=", vcpus);
    if (first) {
        add(" first_gpa=", first->gpa);
        add(" first_expected=", first->expected);
        add(" first_found=", first->found);
    }
}

static void add_paravirt(uint32_t vcpus)
{
    struct paravirt_summary all = paravirt_summary(vcpus);

    add(" has_clock=", !!(all.features & PARAVIRT_CLOCK));
    add(" has_steal=", !!(all.features & PARAVIRT_STEAL));
    add(" has_eoi=", !!(all.features & PARAVIRT_EOI));
    add(" clock_page=", all.clock_page);
    add(" steal_page=", all.steal_page);
    add(" clock_updates=", all.clock_updates);
    add(" clock_us=", all.clock_us);
    add(" steal_updates=", all.steal_updates);
    add(" steal_us=", all.steal_us);
    add(" eois_saved=", all.eois_saved);
    add(" eois_offered=", all.eois_offered);
}

void serial_report_step(const struct guest_view *view, uint64_t ticks)
{
    uint32_t vcpus = guest_report(view)->vcpus, steal = paravirt_steal_version(0);
    struct network_summary network = network_summary();

    if (!booted_by_pvh || ticks < due)
        return;
    due = ticks + PERIOD_TICKS;
    length = 0;
    add_text("vmferry-guest");
    add_memory(view, vcpus);
    add_paravirt(vcpus);
    add(" net_replies=", network.replies);
    add(" net_lost=", network.lost);
    add_text("\n");
    for (unsigned sent = 0; sent < length; sent += BYTES_AT_ONCE) {
        unsigned rest = length - sent;
        out8_string(SERIAL_PORT, line + sent, rest < BYTES_AT_ONCE ? rest : BYTES_AT_ONCE);
    }
    paravirt_must_differ(view, 0, steal);
}
