/* Declarations that the parts of the test guest share. */
#ifndef VMFERRY_GUEST_H
#define VMFERRY_GUEST_H

#include <stdatomic.h>
#include <stdint.h>

#define PAGE_BYTES 4096ull
#define PAGE_WORDS (PAGE_BYTES / 8)

/* Words of a page that are checked and written on each visit; the rest is filled once. */
static const unsigned visited[] = {0, 1, 255, 256, 510, 511};
#define VISITED (sizeof visited / sizeof *visited)

static inline uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

/* The content of a word of a page of this generation. */
static inline uint64_t expected(uint64_t generation, uint64_t page, unsigned word)
{
    return mix(generation * 0x9e3779b97f4a7c15ull + page * PAGE_WORDS + word + 1);
}

void fill_page(uint64_t *words, uint64_t generation, uint64_t page);
int page_is_right(const uint64_t *words, uint64_t generation, uint64_t page);
uint64_t now_us(void);

/* The content of a word of a program page, except for the words checked on each visit. */
uint64_t program_word(uint64_t page, unsigned word);

/* Pages with wrong content, over all parts. */
extern _Atomic uint64_t corruptions;

/* Each starts a thread that works forever and counts its work. */
void start_disk(uint64_t mib, uint64_t rest_us);
void start_network(uint64_t port);
void start_churn(uint64_t mib);
void start_beat(uint64_t period_us);
extern _Atomic uint64_t disk_rounds, disk_errors, net_replies, net_lost, churn_rounds;

void load_modules(void);

#endif
