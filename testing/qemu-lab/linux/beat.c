/*
 * Writes a byte to QEMU's debug port (`isa-debugcon`, port 0xe9) periodically. The reader of these
 * bytes sees for how long the guest was paused, by a clock that does not stop with it.
 */
#include "guest.h"
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <sys/io.h>
#include <time.h>

static void *work(void *period_us)
{
    struct timespec pause = {0, (long)(uintptr_t)period_us * 1000};
    struct sched_param first = {.sched_priority = 50};
    /* Before all other work of the guest, so that a gap is caused by the host, not by the guest. */
    if (sched_setscheduler(0, SCHED_FIFO, &first) || iopl(3)) {
        printf("vmferry-guest failed=no-beat\n");
        return 0;
    }
    for (;;) {
        outb('.', 0xe9);
        nanosleep(&pause, 0);
    }
    return 0;
}

void start_beat(uint64_t period_us)
{
    pthread_t thread;
    if (pthread_create(&thread, 0, work, (void *)(uintptr_t)period_us))
        printf("vmferry-guest failed=no-thread\n");
}
