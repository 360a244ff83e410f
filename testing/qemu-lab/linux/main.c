/*
 * The first and only process of a Linux guest in the tests of QEMU. It writes and checks memory all
 * the time, and reports its progress on the serial console every 100 ms.
 *
 * The kernel's command line sets the workload:
 * - `static=MIB` fills memory once and checks it forever.
 * - `dirty=MIB` rewrites memory continuously, checking each page before it writes it again.
 * - `rest=MICROSECONDS` sleeps after every 64 pages, and four times as long after every chunk of the
 *   disk, which leaves the processors to other tests.
 * - `disk=MIB` reads and writes the first disk.
 * - `net=PORT` exchanges datagrams with a port of the host.
 * - `churn=MIB` allocates and frees memory.
 * - `beat=MICROSECONDS` writes to QEMU's debug port.
 * - `program=MIB` and `hot=MIB` are like `static` and `dirty`, with pages like those of programs
 *   instead of incompressible ones. Of a hot page only a few words change.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "guest.h"

_Atomic uint64_t corruptions;

uint64_t now_us(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000 + (uint64_t)time.tv_nsec / 1000;
}

void fill_page(uint64_t *words, uint64_t generation, uint64_t page)
{
    for (unsigned word = 0; word < PAGE_WORDS; word++)
        words[word] = expected(generation, page, word);
}

int page_is_right(const uint64_t *words, uint64_t generation, uint64_t page)
{
    for (unsigned i = 0; i < VISITED; i++)
        if (words[visited[i]] != expected(generation, page, visited[i]))
            return 0;
    return 1;
}

struct area {
    uint64_t *words, pages, generation, next;
    int of_programs;
};

/* The content of a word of an area's page. */
static uint64_t content(const struct area *area, uint64_t page, unsigned word)
{
    for (unsigned i = 0; area->of_programs && i < VISITED; i++)
        if (visited[i] == word)
            return expected(area->generation, page, word);
    return area->of_programs ? program_word(page, word) : expected(area->generation, page, word);
}

static struct area make_area(uint64_t mib, int of_programs)
{
    struct area area = {0, mib << 8, 1, 0, of_programs};
    if (!area.pages)
        return area;
    area.words = mmap(0, area.pages * PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (area.words == MAP_FAILED) {
        printf("vmferry-guest failed=no-memory\n");
        exit(1);
    }
    for (uint64_t page = 0; page < area.pages; page++) {
        uint64_t *words = area.words + page * PAGE_WORDS;
        if (!of_programs) {
            fill_page(words, area.generation, page);
            continue;
        }
        for (unsigned word = 0; word < PAGE_WORDS; word++)
            words[word] = program_word(page, word);
        for (unsigned i = 0; i < VISITED; i++)
            words[visited[i]] = expected(area.generation, page, visited[i]);
    }
    return area;
}

static uint64_t checked, rounds;

/* Pages before `next` already are of the next generation. */
static void dirty_pages(struct area *area, unsigned count)
{
    for (; count && area->pages; count--) {
        uint64_t page = area->next++;
        corruptions += !page_is_right(area->words + page * PAGE_WORDS, area->generation, page);
        for (unsigned i = 0; i < VISITED; i++)
            area->words[page * PAGE_WORDS + visited[i]] = expected(area->generation + 1, page, visited[i]);
        checked++;
        if (area->next == area->pages) {
            area->next = 0;
            area->generation++;
            rounds++;
        }
    }
}

/* Checks a varying word of each page of the static area. */
static void check_pages(struct area *area, unsigned count, uint64_t *static_rounds)
{
    for (; count && area->pages; count--) {
        uint64_t page = area->next++;
        unsigned word = (unsigned)(mix(page + *static_rounds * 977) % PAGE_WORDS);
        corruptions += area->words[page * PAGE_WORDS + word] != content(area, page, word);
        checked++;
        if (area->next == area->pages) {
            area->next = 0;
            ++*static_rounds;
        }
    }
}

static uint64_t option(const char *line, const char *name)
{
    const char *at = strstr(line, name);
    return at ? strtoull(at + strlen(name), 0, 10) : 0;
}

int main(void)
{
    static char line[4096];
    mkdir("/proc", 0555);
    mount("proc", "/proc", "proc", 0, 0);
    int file = open("/proc/cmdline", O_RDONLY);
    if (file >= 0 && read(file, line, sizeof line - 1) < 0)
        line[0] = 0;

    load_modules();
    uint64_t rest = option(line, " rest=");
    uint64_t disk = option(line, " disk="), port = option(line, " net="), churn = option(line, " churn=");
    if (disk)
        start_disk(disk, 4 * rest);
    if (port)
        start_network(port);
    if (churn)
        start_churn(churn);
    if (option(line, " beat="))
        start_beat(option(line, " beat="));

    struct area fixed = make_area(option(line, " static="), 0), programs = make_area(option(line, " program="), 1);
    struct area hot = make_area(option(line, " dirty="), 0), hot_programs = make_area(option(line, " hot="), 1);
    uint64_t static_rounds = 0, last = now_us(), said = 0, longest_gap = 0, gap_since_said = 0;
    setvbuf(stdout, 0, _IOLBF, 0);
    printf("vmferry-guest ready=1\n");
    for (;;) {
        dirty_pages(&hot, 64);
        dirty_pages(&hot_programs, 64);
        check_pages(&fixed, rest ? 64 : 16, &static_rounds);
        check_pages(&programs, rest ? 64 : 16, &static_rounds);
        uint64_t rest_us = hot.pages || hot_programs.pages ? rest : 1000;
        if (rest_us) {
            struct timespec pause = {0, (long)rest_us * 1000};
            nanosleep(&pause, 0);
        }
        uint64_t now = now_us(), gap = now - last;
        last = now;
        if (gap > longest_gap)
            longest_gap = gap;
        if (gap > gap_since_said)
            gap_since_said = gap;
        if (now - said >= 100000) {
            said = now;
            printf("vmferry-guest rounds=%llu static_rounds=%llu checked=%llu corruptions=%llu gap_us=%llu longest_gap_us=%llu "
                   "disk_rounds=%llu disk_errors=%llu net_replies=%llu net_lost=%llu churn_rounds=%llu uptime_us=%llu\n",
                   (unsigned long long)rounds, (unsigned long long)static_rounds, (unsigned long long)checked,
                   (unsigned long long)corruptions, (unsigned long long)gap_since_said,
                   (unsigned long long)longest_gap, (unsigned long long)disk_rounds,
                   (unsigned long long)disk_errors, (unsigned long long)net_replies, (unsigned long long)net_lost,
                   (unsigned long long)churn_rounds, (unsigned long long)now);
            gap_since_said = 0;
        }
    }
}
