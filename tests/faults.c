/* Counts the operations on files under one folder and makes the Nth of them fail, or kills the process before it.
   Preloaded; idle until fault_arm is called. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static long at, count;
static int code, sticky; /* code 0 kills; else the errno to return */

void fault_arm(const char *folder, long n, int error, int stays) {
    strncpy(root, folder, sizeof root - 1);
    at = n, code = error, sticky = stays, count = 0;
}
long fault_count(void) { return count; }

static int under(const char *path) {
    size_t n = strlen(root);
    return n && path && !strncmp(path, root, n) && (path[n] == '/' || !path[n]);
}

static int under_at(int dir, const char *path) {
    char link[64], base[PATH_MAX], whole[2 * PATH_MAX];
    if (!root[0] || !path) return 0;
    if (path[0] == '/') return under(path);
    if (dir == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) return 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
        ssize_t n = readlink(link, base, sizeof base - 1);
        if (n < 0) return 0;
        base[n] = 0;
    }
    snprintf(whole, sizeof whole, "%s/%s", base, path);
    return under(whole);
}

static int under_fd(int fd) {
    char link[64], path[PATH_MAX];
    if (!root[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return under(path);
}

/* Whether this operation is to fail. */
static int hit(int concerned) {
    if (!concerned) return 0;
    long now = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
    if (!at || (sticky ? now < at : now != at)) return 0;
    if (!code) kill(getpid(), SIGKILL);
    errno = code;
    return 1;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define WRITES(flags) ((flags) & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR))
#define MODE mode_t mode = 0; if (flags & O_CREAT) { va_list a; va_start(a, flags); mode = va_arg(a, mode_t); va_end(a); }

int open(const char *p, int flags, ...) { MODE return hit(WRITES(flags) && under_at(AT_FDCWD, p)) ? -1 : NEXT(open)(p, flags, mode); }
int open64(const char *p, int flags, ...) { MODE return hit(WRITES(flags) && under_at(AT_FDCWD, p)) ? -1 : NEXT(open64)(p, flags, mode); }
int openat(int d, const char *p, int flags, ...) { MODE return hit(WRITES(flags) && under_at(d, p)) ? -1 : NEXT(openat)(d, p, flags, mode); }
int openat64(int d, const char *p, int flags, ...) { MODE return hit(WRITES(flags) && under_at(d, p)) ? -1 : NEXT(openat64)(d, p, flags, mode); }
FILE *fopen(const char *p, const char *m) { return hit(m[0] != 'r' && under_at(AT_FDCWD, p)) ? NULL : NEXT(fopen)(p, m); }
FILE *fopen64(const char *p, const char *m) { return hit(m[0] != 'r' && under_at(AT_FDCWD, p)) ? NULL : NEXT(fopen64)(p, m); }

/* Half of the bytes arrive before a kill or a full disk: files are cut in the middle, not between writes. */
ssize_t write(int fd, const void *b, size_t n) {
    if (under_fd(fd)) {
        int last = at && count + 1 == at;
        if (last && n > 1) NEXT(write)(fd, b, n / 2);
        if (hit(1)) return -1;
    }
    return NEXT(write)(fd, b, n);
}
ssize_t writev(int fd, const struct iovec *v, int n) { return hit(under_fd(fd)) ? -1 : NEXT(writev)(fd, v, n); }
ssize_t pwrite(int fd, const void *b, size_t n, off_t o) { return hit(under_fd(fd)) ? -1 : NEXT(pwrite)(fd, b, n, o); }
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t o) { return hit(under_fd(fd)) ? -1 : NEXT(pwrite64)(fd, b, n, o); }
int ftruncate(int fd, off_t n) { return hit(under_fd(fd)) ? -1 : NEXT(ftruncate)(fd, n); }
int ftruncate64(int fd, off64_t n) { return hit(under_fd(fd)) ? -1 : NEXT(ftruncate64)(fd, n); }
int posix_fallocate(int fd, off_t o, off_t n) { return hit(under_fd(fd)) ? code : NEXT(posix_fallocate)(fd, o, n); }
int fsync(int fd) { return hit(under_fd(fd)) ? -1 : NEXT(fsync)(fd); }
int fdatasync(int fd) { return hit(under_fd(fd)) ? -1 : NEXT(fdatasync)(fd); }
int rename(const char *a, const char *b) { return hit(under_at(AT_FDCWD, b)) ? -1 : NEXT(rename)(a, b); }
int renameat(int d, const char *a, int e, const char *b) { return hit(under_at(e, b)) ? -1 : NEXT(renameat)(d, a, e, b); }
int renameat2(int d, const char *a, int e, const char *b, unsigned f) { return hit(under_at(e, b)) ? -1 : NEXT(renameat2)(d, a, e, b, f); }
int mkdir(const char *p, mode_t m) { return hit(under_at(AT_FDCWD, p)) ? -1 : NEXT(mkdir)(p, m); }
int mkdirat(int d, const char *p, mode_t m) { return hit(under_at(d, p)) ? -1 : NEXT(mkdirat)(d, p, m); }
int unlink(const char *p) { return hit(under_at(AT_FDCWD, p)) ? -1 : NEXT(unlink)(p); }
int unlinkat(int d, const char *p, int f) { return hit(under_at(d, p)) ? -1 : NEXT(unlinkat)(d, p, f); }
int rmdir(const char *p) { return hit(under_at(AT_FDCWD, p)) ? -1 : NEXT(rmdir)(p); }
