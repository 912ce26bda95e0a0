"""System calls that fail on purpose: a small library put before the C library (``LD_PRELOAD``).

The environment says which calls of a process fail, and how. Each variable is read at every call, so that one server
can fork processes with different faults:

``FAULT_CALL``
    ``read``, ``write``, ``fsync``, ``rename``, ``link``, ``truncate``, ``mkdir``, ``unlink``, ``open``, ``chmod``,
    ``lock`` (``flock``, and the locks of ``fcntl``), ``symlink``, ``rmdir``, ``list``, ``stat``, ``close`` (which
    closes all the same), ``room`` (``statvfs``); each stands for its relatives too (``pread``, ``preadv2``,
    ``fdatasync``, ``linkat``, ...). ``any`` is all of them.
``FAULT_PATH``
    Only calls on paths that contain this.
``FAULT_NTH``
    Only the n-th such call of the process, counted from 1; 0 for all of them.
``FAULT_ERROR``
    The error number; ``0`` makes reads and writes short instead (one byte, or half of what was asked for).
``FAULT_LOG``
    A file that gets one line ``call path`` for each call that matched.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

_SOURCE = r"""
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_int seen;

static void note(const char *call, const char *path) {
    const char *log = getenv("FAULT_LOG");
    char line[PATH_MAX + 32];
    if (!log) return;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0644);
    int size = snprintf(line, sizeof line, "%s %s\n", call, path);
    if (fd >= 0) {
        syscall(SYS_write, fd, line, (size_t)size);
        syscall(SYS_close, fd);
    }
}

/* The error for this call, 0 for a short transfer, -1 for none. */
static int fault(const char *call, const char *path) {
    const char *wanted = getenv("FAULT_CALL"), *part = getenv("FAULT_PATH"), *nth = getenv("FAULT_NTH");
    const char *error = getenv("FAULT_ERROR");
    if (!wanted || (strcmp(wanted, call) && strcmp(wanted, "any")) || (part && !strstr(path, part))) return -1;
    note(call, path);
    int number = atomic_fetch_add(&seen, 1) + 1;
    if (!error || (nth && atoi(nth) && atoi(nth) != number)) return -1;
    return atoi(error);
}

static int fault_of_fd(const char *call, int fd) {
    char link[64], path[PATH_MAX];
    if (!getenv("FAULT_CALL")) return -1;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return -1;
    path[size] = 0;
    return fault(call, path);
}

static size_t shorter(size_t count) {
    return count > 4096 ? count / 2 : count > 1 ? 1 : count;
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define FAIL(expression) do { int e = (expression); if (e > 0) { errno = e; return -1; } } while (0)
#define TRANSFER(call, fd, count) \
    do { \
        int e = fault_of_fd(call, fd); \
        if (e > 0) { errno = e; return -1; } \
        if (e == 0) count = shorter(count); \
    } while (0)

ssize_t read(int fd, void *to, size_t n) { REAL(read); TRANSFER("read", fd, n); return real(fd, to, n); }
ssize_t pread(int fd, void *to, size_t n, off_t at) {
    REAL(pread); TRANSFER("read", fd, n); return real(fd, to, n, at);
}
ssize_t pread64(int fd, void *to, size_t n, off64_t at) {
    REAL(pread64); TRANSFER("read", fd, n); return real(fd, to, n, at);
}
ssize_t write(int fd, const void *from, size_t n) { REAL(write); TRANSFER("write", fd, n); return real(fd, from, n); }
ssize_t pwrite(int fd, const void *from, size_t n, off_t at) {
    REAL(pwrite); TRANSFER("write", fd, n); return real(fd, from, n, at);
}
ssize_t pwrite64(int fd, const void *from, size_t n, off64_t at) {
    REAL(pwrite64); TRANSFER("write", fd, n); return real(fd, from, n, at);
}
ssize_t sendfile(int out, int in, off_t *at, size_t n) {
    REAL(sendfile); TRANSFER("write", out, n); return real(out, in, at, n);
}
ssize_t sendfile64(int out, int in, off64_t *at, size_t n) {
    REAL(sendfile64); TRANSFER("write", out, n); return real(out, in, at, n);
}

#define VECTOR(fd, parts, count) \
    struct iovec first = *parts; \
    do { \
        int e = fault_of_fd("read", fd); \
        if (e > 0) { errno = e; return -1; } \
        if (e == 0) { first.iov_len = shorter(first.iov_len); parts = &first; count = 1; } \
    } while (0)

ssize_t preadv(int fd, const struct iovec *v, int n, off_t at) {
    REAL(preadv); VECTOR(fd, v, n); return real(fd, v, n, at);
}
ssize_t preadv64(int fd, const struct iovec *v, int n, off64_t at) {
    REAL(preadv64); VECTOR(fd, v, n); return real(fd, v, n, at);
}
ssize_t preadv2(int fd, const struct iovec *v, int n, off_t at, int flags) {
    REAL(preadv2); VECTOR(fd, v, n); return real(fd, v, n, at, flags);
}
ssize_t preadv64v2(int fd, const struct iovec *v, int n, off64_t at, int flags) {
    REAL(preadv64v2); VECTOR(fd, v, n); return real(fd, v, n, at, flags);
}

/* Nothing is flushed in truth: it takes most of a small build's time, and only a power cut would tell. */
int fsync(int fd) { FAIL(fault_of_fd("fsync", fd)); return 0; }
int fdatasync(int fd) { FAIL(fault_of_fd("fsync", fd)); return 0; }
int ftruncate(int fd, off_t n) { REAL(ftruncate); FAIL(fault_of_fd("truncate", fd)); return real(fd, n); }
int fallocate(int fd, int mode, off_t from, off_t n) {
    REAL(fallocate); FAIL(fault_of_fd("truncate", fd)); return real(fd, mode, from, n);
}
int ftruncate64(int fd, off64_t n) { REAL(ftruncate64); FAIL(fault_of_fd("truncate", fd)); return real(fd, n); }
int rename(const char *a, const char *b) { REAL(rename); FAIL(fault("rename", a)); return real(a, b); }
int renameat(int x, const char *a, int y, const char *b) {
    REAL(renameat); FAIL(fault("rename", a)); return real(x, a, y, b);
}
int renameat2(int x, const char *a, int y, const char *b, unsigned f) {
    REAL(renameat2); FAIL(fault("rename", a)); return real(x, a, y, b, f);
}
int link(const char *a, const char *b) { REAL(link); FAIL(fault("link", b)); return real(a, b); }
int linkat(int x, const char *a, int y, const char *b, int f) {
    REAL(linkat); FAIL(fault("link", b)); return real(x, a, y, b, f);
}
int mkdir(const char *a, mode_t m) { REAL(mkdir); FAIL(fault("mkdir", a)); return real(a, m); }
int unlink(const char *a) { REAL(unlink); FAIL(fault("unlink", a)); return real(a); }
int unlinkat(int x, const char *a, int f) { REAL(unlinkat); FAIL(fault("unlink", a)); return real(x, a, f); }
int chmod(const char *a, mode_t m) { REAL(chmod); FAIL(fault("chmod", a)); return real(a, m); }
int fchmod(int fd, mode_t m) { REAL(fchmod); FAIL(fault_of_fd("chmod", fd)); return real(fd, m); }
int fchmodat(int x, const char *a, mode_t m, int f) {
    REAL(fchmodat); FAIL(fault("chmod", a)); return real(x, a, m, f);
}
int symlink(const char *a, const char *b) { REAL(symlink); FAIL(fault("symlink", b)); return real(a, b); }
int symlinkat(const char *a, int x, const char *b) {
    REAL(symlinkat); FAIL(fault("symlink", b)); return real(a, x, b);
}
int rmdir(const char *a) { REAL(rmdir); FAIL(fault("rmdir", a)); return real(a); }
DIR *opendir(const char *a) {
    REAL(opendir);
    int e = fault("list", a);
    if (e > 0) { errno = e; return NULL; }
    return real(a);
}
DIR *fdopendir(int fd) {
    REAL(fdopendir);
    int e = fault_of_fd("list", fd);
    if (e > 0) { errno = e; return NULL; }
    return real(fd);
}

#define STAT(kind, suffix) \
    int stat##suffix(const char *a, struct kind *to) { \
        REAL(stat##suffix); FAIL(fault("stat", a)); return real(a, to); \
    } \
    int lstat##suffix(const char *a, struct kind *to) { \
        REAL(lstat##suffix); FAIL(fault("stat", a)); return real(a, to); \
    } \
    int fstat##suffix(int fd, struct kind *to) { \
        REAL(fstat##suffix); FAIL(fault_of_fd("stat", fd)); return real(fd, to); \
    } \
    int fstatat##suffix(int x, const char *a, struct kind *to, int f) { \
        REAL(fstatat##suffix); FAIL(fault("stat", a)); return real(x, a, to, f); \
    }
STAT(stat,)
STAT(stat64, 64)
int close(int fd) { REAL(close); int error = fault_of_fd("close", fd); int done = real(fd); FAIL(error); return done; }
int statvfs(const char *a, struct statvfs *to) { REAL(statvfs); FAIL(fault("room", a)); return real(a, to); }
int statvfs64(const char *a, struct statvfs64 *to) { REAL(statvfs64); FAIL(fault("room", a)); return real(a, to); }

int flock(int fd, int how) { REAL(flock); FAIL(fault_of_fd("lock", fd)); return real(fd, how); }
#define LOCKS(command) (command == F_SETLK || command == F_SETLKW || command == F_GETLK)
#define CONTROL(name) \
    int name(int fd, int command, ...) { \
        REAL(name); \
        va_list list; \
        va_start(list, command); \
        void *value = va_arg(list, void *); \
        va_end(list); \
        if (LOCKS(command)) FAIL(fault_of_fd("lock", fd)); \
        return real(fd, command, value); \
    }
CONTROL(fcntl)
CONTROL(fcntl64)

#define MODE(flags, mode) \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
        va_list list; \
        va_start(list, flags); \
        mode = va_arg(list, mode_t); \
        va_end(list); \
    }

int open(const char *a, int flags, ...) {
    REAL(open); MODE(flags, mode); FAIL(fault("open", a)); return real(a, flags, mode);
}
int open64(const char *a, int flags, ...) {
    REAL(open64); MODE(flags, mode); FAIL(fault("open", a)); return real(a, flags, mode);
}
int openat(int x, const char *a, int flags, ...) {
    REAL(openat); MODE(flags, mode); FAIL(fault("open", a)); return real(x, a, flags, mode);
}
int openat64(int x, const char *a, int flags, ...) {
    REAL(openat64); MODE(flags, mode); FAIL(fault("open", a)); return real(x, a, flags, mode);
}
"""


def compile_faults(folder: Path) -> Path | None:
    """Compile the library into ``folder``; return None where there is no C compiler that can."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    source, library = folder / "faults.c", folder / "faults.so"
    source.write_text(_SOURCE, encoding="utf-8")
    argv = [compiler, "-O1", "-w", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    done = subprocess.run(argv, capture_output=True, check=False, timeout=120)
    return library if done.returncode == 0 else None
