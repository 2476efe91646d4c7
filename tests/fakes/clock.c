/* A wall clock that jumps on command, for LD_PRELOAD: FAKE_CLOCK names a file with a number of seconds that is added to the real one.
 *
 *     gcc -shared -fPIC -o clock.so clock.c -ldl
 *
 * The monotonic clock is left alone, as it is by whoever sets a real clock.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long offset_s(void)
{
    const char *path = getenv("FAKE_CLOCK");
    FILE *file = path ? fopen(path, "r") : NULL;
    long seconds = 0;
    if (!file) return 0;
    if (fscanf(file, "%ld", &seconds) != 1) seconds = 0;
    fclose(file);
    return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (code == 0 && clock == CLOCK_REALTIME) now->tv_sec += offset_s();
    return code;
}

time_t time(time_t *now)
{
    struct timespec spec;
    clock_gettime(CLOCK_REALTIME, &spec);
    if (now) *now = spec.tv_sec;
    return spec.tv_sec;
}

int gettimeofday(struct timeval *now, void *zone)
{
    struct timespec spec;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &spec);
    now->tv_sec = spec.tv_sec;
    now->tv_usec = spec.tv_nsec / 1000;
    return 0;
}
