/* Moves the clock of a process: what it reads as the time of day is off by as many seconds as the file $CHAOS_CLOCK says (a long, which may
   change at any time). Loaded by LD_PRELOAD. Other clocks, and the kernel's own, go on. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long *off_s;
static int (*read_clock)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    read_clock = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) off_s = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!read_clock) begin(); /* another library's constructor came first */
    int failed = read_clock(clock, now);
    if (!failed && off_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *off_s;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec read;
    if (clock_gettime(CLOCK_REALTIME, &read)) return -1;
    now->tv_sec = read.tv_sec;
    now->tv_usec = read.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec read;
    if (clock_gettime(CLOCK_REALTIME, &read)) return -1;
    if (now) *now = read.tv_sec;
    return read.tv_sec;
}
