/* The disk of a node under test, loaded before its libc. Files beside this library are its switches: while `hangs` is
   there no sync returns, while `full` is there no file takes a write. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int is_set(const char *name)
{
    static char path[4096];
    static size_t folder;
    char file[4200];
    if (!folder) {
        Dl_info info;
        const char *slash = dladdr((void *)is_set, &info) ? strrchr(info.dli_fname, '/') : NULL;
        if (!slash)
            return 0;
        memcpy(path, info.dli_fname, slash + 1 - info.dli_fname);
        folder = slash + 1 - info.dli_fname;
    }
    snprintf(file, sizeof file, "%.*s%s", (int)folder, path, name);
    return access(file, F_OK) == 0;
}

int fdatasync(int fd)
{
    while (is_set("hangs"))
        usleep(5000);
    return syscall(SYS_fdatasync, fd);
}

int fsync(int fd)
{
    while (is_set("hangs"))
        usleep(5000);
    return syscall(SYS_fsync, fd);
}

ssize_t write(int fd, const void *bytes, size_t count)
{
    struct stat info;
    if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && is_set("full")) {
        errno = ENOSPC;
        return -1;
    }
    return syscall(SYS_write, fd, bytes, count);
}
