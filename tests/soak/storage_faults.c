/* Makes the calls of a process on files below a folder fail, by LD_PRELOAD (tests/soak/storage_faults.py).

   The state lies in the file FAULTS_STATE, which the rank and the processes that it starts map: so the writer of an
   asynchronous save is among them. Calls are counted from when it was armed; those from number `at` on fail, `left`
   times. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { HANG = -1, PARTIAL = -2 };

struct state {
    int armed, at, left, kind; /* kind: an errno, HANG or PARTIAL */
    int calls, hits, hang_ms;
    char folder[4096];
};

static struct state *state(void) {
    static struct state *mapped;
    const char *path = mapped ? NULL : getenv("FAULTS_STATE");
    if (path) {
        static int (*real)(const char *, int, ...);
        if (!real) real = dlsym(RTLD_NEXT, "open64");
        int file = real(path, O_RDWR);
        if (file >= 0) {
            void *found = mmap(NULL, sizeof *mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
            if (found != MAP_FAILED) mapped = found;
            ((int (*)(int))dlsym(RTLD_NEXT, "close"))(file);
        }
    }
    return mapped && mapped->armed ? mapped : NULL;
}

static int below(const struct state *now, const char *path) {
    return path && !strncmp(path, now->folder, strlen(now->folder));
}

static int open_below(const struct state *now, int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return below(now, path);
}

/* Whether this call, on a file that counts, fails: errno is set. 2: a write is to be cut. */
static int hit(struct state *now) {
    int number = __sync_fetch_and_add(&now->calls, 1);
    if (number < now->at) return 0;
    if (__sync_fetch_and_sub(&now->left, 1) <= 0) return 0;
    __sync_fetch_and_add(&now->hits, 1);
    if (now->kind == PARTIAL) return 2;
    if (now->kind == HANG) {
        struct timespec left = {now->hang_ms / 1000, now->hang_ms % 1000 * 1000000L};
        while (nanosleep(&left, &left)) {}
        return 0;
    }
    errno = now->kind;
    return 1;
}

static int fails_at(int folder, const char *path) {
    struct state *now = state();
    if (!now || !path) return 0;
    int counts = *path == '/' || folder == AT_FDCWD ? below(now, path) : open_below(now, folder);
    return counts && hit(now) == 1;
}

static int fails_on(int file) {
    struct state *now = state();
    return now && open_below(now, file) ? hit(now) : 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define OPEN(name)                                                       \
    int name(const char *path, int flags, ...) {                         \
        va_list rest;                                                    \
        va_start(rest, flags);                                           \
        mode_t mode = va_arg(rest, mode_t);                              \
        va_end(rest);                                                    \
        return fails_at(AT_FDCWD, path) ? -1 : REAL(name)(path, flags, mode); \
    }
#define OPENAT(name)                                                     \
    int name(int folder, const char *path, int flags, ...) {             \
        va_list rest;                                                    \
        va_start(rest, flags);                                           \
        mode_t mode = va_arg(rest, mode_t);                              \
        va_end(rest);                                                    \
        return fails_at(folder, path) ? -1 : REAL(name)(folder, path, flags, mode); \
    }
#define ON_PATH(type, failed, name, given, passed) \
    type name given { return fails_at(AT_FDCWD, path) ? failed : REAL(name) passed; }
#define ON_FILE(type, name, given, passed) \
    type name given { return fails_on(file) == 1 ? -1 : REAL(name) passed; }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
ON_PATH(int, -1, mkdir, (const char *path, mode_t mode), (path, mode))
ON_PATH(int, -1, rmdir, (const char *path), (path))
ON_PATH(int, -1, unlink, (const char *path), (path))
ON_PATH(int, -1, rename, (const char *path, const char *target), (path, target))
ON_PATH(int, -1, stat, (const char *restrict path, struct stat *restrict out), (path, out))
ON_PATH(int, -1, stat64, (const char *restrict path, struct stat64 *restrict out), (path, out))
ON_PATH(DIR *, NULL, opendir, (const char *path), (path))
ON_FILE(ssize_t, read, (int file, void *data, size_t size), (file, data, size))
ON_FILE(int, fsync, (int file), (file))
ON_FILE(int, fdatasync, (int file), (file))

int unlinkat(int folder, const char *path, int flags) {
    return fails_at(folder, path) ? -1 : REAL(unlinkat)(folder, path, flags);
}

ssize_t write(int file, const void *data, size_t size) {
    int how = fails_on(file);
    if (how == 1) return -1;
    return REAL(write)(file, data, how == 2 && size > 1 ? size / 2 : size);
}

int close(int file) { /* it is closed all the same, as by NFS */
    int failed = fails_on(file) == 1, number = errno;
    int result = REAL(close)(file);
    if (failed) errno = number;
    return failed ? -1 : result;
}
