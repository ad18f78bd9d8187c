/* The time of day of a node under test, loaded before its libc. The file `ahead` beside this library says by how many
   seconds it is ahead; without it, it is right. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static long ahead_s(void)
{
    static char path[4096];
    static volatile int known;
    long seconds = 0;
    FILE *file;
    if (!known) {
        Dl_info info;
        const char *slash = dladdr((void *)ahead_s, &info) ? strrchr(info.dli_fname, '/') : NULL;
        if (!slash)
            return 0;
        snprintf(path, sizeof path, "%.*sahead", (int)(slash + 1 - info.dli_fname), info.dli_fname);
        known = 1;
    }
    file = fopen(path, "r");
    if (!file)
        return 0;
    if (fscanf(file, "%ld", &seconds) != 1)
        seconds = 0;
    fclose(file);
    return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *time)
{
    int failed = syscall(SYS_clock_gettime, clock, time);
    if (!failed && clock == CLOCK_REALTIME)
        time->tv_sec += ahead_s();
    return failed;
}
