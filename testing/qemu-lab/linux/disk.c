/*
 * Reads and writes the first disk with direct I/O, forever.
 *
 * The disk has three parts of the same size. Two hold patterns, and are read alternately into one
 * memory area. Before a chunk is read again, it must still hold what the previous sweep has read,
 * so a page that the disk wrote and that was lost in a migration is found. A fraction of the third
 * part's chunks is written in each sweep and read back in the next. Without a rest, several threads
 * keep the disk busy, so that a request is always pending.
 */
#define _GNU_SOURCE
#include "guest.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define CHUNK_BYTES 262144ull
#define CHUNK_PAGES (CHUNK_BYTES / PAGE_BYTES)

#define THREADS 4
#define WRITTEN 8 /* One of this number of chunks is written. */

_Atomic uint64_t disk_rounds, disk_errors;

static uint64_t chunks;
static struct timespec pause_after_chunk;
static int file;

static void fill_chunk(uint64_t *words, uint64_t generation, uint64_t chunk)
{
    for (uint64_t page = 0; page < CHUNK_PAGES; page++)
        fill_page(words + page * PAGE_WORDS, generation, chunk * CHUNK_PAGES + page);
}

static void check_chunk(const uint64_t *words, uint64_t generation, uint64_t chunk)
{
    for (uint64_t page = 0; page < CHUNK_PAGES; page++)
        corruptions += !page_is_right(words + page * PAGE_WORDS, generation, chunk * CHUNK_PAGES + page);
}

static void move(int write, uint64_t part, uint64_t chunk, void *bytes)
{
    off_t at = (off_t)((part * chunks + chunk) * CHUNK_BYTES);
    ssize_t moved = write ? pwrite(file, bytes, CHUNK_BYTES, at) : pread(file, bytes, CHUNK_BYTES, at);
    disk_errors += moved != (ssize_t)CHUNK_BYTES;
}

/* Uses every THREADS-th chunk, starting with `first`. */
static void *work(void *first)
{
    uint64_t *area = mmap(0, chunks * CHUNK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint64_t *one = mmap(0, CHUNK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (area == MAP_FAILED || one == MAP_FAILED)
        exit(1);
    for (uint64_t part = 0; part < 3; part++)
        for (uint64_t chunk = (uintptr_t)first; chunk < chunks; chunk += THREADS) {
            fill_chunk(one, part, chunk);
            move(1, part, chunk, one);
        }
    for (uint64_t chunk = (uintptr_t)first; chunk < chunks; chunk += THREADS)
        move(0, 0, chunk, area + chunk * (CHUNK_BYTES / 8));
    for (uint64_t sweep = 0;; sweep++) {
        for (uint64_t chunk = (uintptr_t)first; chunk < chunks; chunk += THREADS) {
            uint64_t *here = area + chunk * (CHUNK_BYTES / 8);
            check_chunk(here, sweep & 1, chunk);
            move(0, ~sweep & 1, chunk, here);
            if (pause_after_chunk.tv_nsec)
                nanosleep(&pause_after_chunk, 0);
            if (chunk / THREADS % WRITTEN)
                continue;
            move(0, 2, chunk, one);
            check_chunk(one, sweep + 2, chunk);
            fill_chunk(one, sweep + 3, chunk);
            move(1, 2, chunk, one);
        }
        disk_rounds++;
    }
    return 0;
}

void start_disk(uint64_t mib, uint64_t rest_us)
{
    pause_after_chunk.tv_nsec = (long)rest_us * 1000;
    chunks = (mib << 20) / CHUNK_BYTES;
    file = open("/dev/vda", O_RDWR | O_DIRECT);
    for (uintptr_t first = 0; first < THREADS; first++) {
        pthread_t thread;
        if (file < 0 || pthread_create(&thread, 0, work, (void *)first))
            printf("vmferry-guest failed=no-disk\n");
    }
}
