/*
 * Allocates memory, uses it, and frees it, forever. With free-page reporting the kernel returns it
 * to the host some seconds later.
 */
#include "guest.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

_Atomic uint64_t churn_rounds;

static void *work(void *argument)
{
    uint64_t pages = (uint64_t)(uintptr_t)argument << 8;
    for (uint64_t round = 1;; round++) {
        struct timespec held = {0, 300000000}, given_back = {3, 500000000};
        uint64_t *words = mmap(0, pages * PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (words == MAP_FAILED)
            exit(1);
        for (uint64_t page = 0; page < pages; page++) {
            /* Memory that the kernel allocates is zero, whatever the host did with it. */
            for (unsigned word = 0; word < PAGE_WORDS; word++)
                corruptions += words[page * PAGE_WORDS + word] != 0;
            fill_page(words + page * PAGE_WORDS, round, page);
        }
        nanosleep(&held, 0);
        for (uint64_t page = 0; page < pages; page++)
            corruptions += !page_is_right(words + page * PAGE_WORDS, round, page);
        munmap(words, pages * PAGE_BYTES);
        churn_rounds++;
        nanosleep(&given_back, 0);
    }
    return 0;
}

void start_churn(uint64_t mib)
{
    pthread_t thread;
    if (pthread_create(&thread, 0, work, (void *)(uintptr_t)mib))
        printf("vmferry-guest failed=no-thread\n");
}
