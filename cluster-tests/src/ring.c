/* The io_uring of a node under test, loaded before its libc. A file beside this library is its switch: with `refused` no
   ring is made; with `fails` calls take half of what they are given and say so, and after 20 of them one takes half and
   fails, as do all that follow. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int is_set(const char *name)
{
    Dl_info info;
    char file[4200];
    const char *slash = dladdr((void *)is_set, &info) ? strrchr(info.dli_fname, '/') : NULL;
    if (!slash || slash - info.dli_fname > 4000)
        return 0;
    snprintf(file, sizeof file, "%.*s%s", (int)(slash + 1 - info.dli_fname), info.dli_fname, name);
    return access(file, F_OK) == 0;
}

long syscall(long number, ...)
{
    static long (*next)(long, ...);
    static atomic_int calls;
    long args[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++)
        args[i] = va_arg(list, long);
    va_end(list);
    if (!next)
        next = dlsym(RTLD_NEXT, "syscall");
    if (number == SYS_io_uring_setup && is_set("refused")) {
        errno = EPERM;
        return -1;
    }
    if (number == SYS_io_uring_enter && is_set("fails")) {
        int call = atomic_fetch_add(&calls, 1);
        if (call <= 20 && args[1] > 1) {
            args[1] /= 2;
            args[2] = args[1];
            long taken = next(number, args[0], args[1], args[2], args[3], args[4], args[5]);
            if (call < 20)
                return taken;
        }
        if (call >= 20) {
            errno = EIO;
            return -1;
        }
    }
    return next(number, args[0], args[1], args[2], args[3], args[4], args[5]);
}
