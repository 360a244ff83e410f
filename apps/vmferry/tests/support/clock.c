/* A host clock that jumps, for LD_PRELOAD: CLOCK_REALTIME plus an offset in seconds from a file that
 * the test writes. Monotonic clocks are unchanged. The file is mapped at the start, because a process
 * that has restricted itself can't open it later. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const char *text = "0";

__attribute__((constructor)) static void map(void)
{
	const char *path = getenv("VMFERRY_TEST_CLOCK");
	int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
	if (file < 0)
		return;
	void *mapped = mmap(NULL, 32, PROT_READ, MAP_SHARED, file, 0);
	close(file);
	if (mapped != MAP_FAILED)
		text = mapped;
}

static long offset(void)
{
	return atol(text);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
	int failed = syscall(SYS_clock_gettime, clock, now);
	if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
		now->tv_sec += offset();
	return failed;
}

int gettimeofday(struct timeval *now, void *zone)
{
	struct timespec exact;
	(void)zone;
	if (clock_gettime(CLOCK_REALTIME, &exact))
		return -1;
	now->tv_sec = exact.tv_sec;
	now->tv_usec = exact.tv_nsec / 1000;
	return 0;
}

time_t time(time_t *now)
{
	struct timespec exact;
	if (clock_gettime(CLOCK_REALTIME, &exact))
		return -1;
	if (now)
		*now = exact.tv_sec;
	return exact.tv_sec;
}
