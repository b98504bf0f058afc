// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
// A preloaded library that makes a folder's disk fail after a number of bytes, for any user, root included.
//   FULL_DISK_FOLDER  the folder
//   FULL_DISK_COUNT   a file of 8 bytes: the bytes written so far by all processes
//   FULL_DISK_BYTES   how many may be written
//   FULL_DISK_ERRNO   what then comes: 28 (ENOSPC, no space) or 30 (EROFS: nothing can be made, changed or removed)
#define _GNU_SOURCE 1
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace {

template <class F>
F next(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

struct Disk {
  const char* folder = getenv("FULL_DISK_FOLDER");
  long limit = atol(getenv("FULL_DISK_BYTES") ? getenv("FULL_DISK_BYTES") : "0");
  int error = atoi(getenv("FULL_DISK_ERRNO") ? getenv("FULL_DISK_ERRNO") : "28");
  long* used = nullptr;
  Disk() {
    int fd = next<int (*)(const char*, int, ...)>("open")(getenv("FULL_DISK_COUNT"), O_RDWR);
    void* page = mmap(nullptr, 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page != MAP_FAILED) used = static_cast<long*>(page);
  }
};

Disk& disk() {
  static Disk the_disk;
  return the_disk;
}

bool inside(const char* path) {
  Disk& d = disk();
  if (!d.folder || !d.used || !path) return false;
  char full[PATH_MAX];
  if (path[0] != '/') {
    char here[PATH_MAX];
    if (!getcwd(here, sizeof here) || snprintf(full, sizeof full, "%s/%s", here, path) >= PATH_MAX) return false;
    path = full;
  }
  return strncmp(path, d.folder, strlen(d.folder)) == 0;
}

bool inside(int fd) {
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n <= 0) return false;
  path[n] = 0;
  return path[0] == '/' && inside(path);
}

// How many of n bytes the disk still takes.
size_t room(size_t n) {
  Disk& d = disk();
  long before = __atomic_fetch_add(d.used, static_cast<long>(n), __ATOMIC_RELAXED);
  if (before >= d.limit) return 0;
  return before + static_cast<long>(n) > d.limit ? static_cast<size_t>(d.limit - before) : n;
}

bool full() { return *disk().used >= disk().limit; }

int refuse() {
  errno = disk().error;
  return -1;
}

bool read_only(const char* path) { return inside(path) && disk().error == EROFS && full(); }

int open_as(const char* name, const char* path, int flags, mode_t mode) {
  bool writes = (flags & O_ACCMODE) != O_RDONLY || (flags & O_CREAT);
  if (writes && read_only(path)) return refuse();
  return next<int (*)(const char*, int, ...)>(name)(path, flags, mode);
}

}  // namespace

#define MODE(flags)                      \
  mode_t mode = 0;                       \
  if ((flags) & (O_CREAT | O_TMPFILE)) { \
    va_list rest;                        \
    va_start(rest, flags);               \
    mode = va_arg(rest, mode_t);         \
    va_end(rest);                        \
  }

extern "C" {
int open(const char* path, int flags, ...) {
  MODE(flags)
  return open_as("open", path, flags, mode);
}
int open64(const char* path, int flags, ...) {
  MODE(flags)
  return open_as("open64", path, flags, mode);
}
ssize_t write(int fd, const void* data, size_t n) {
  if (n && inside(fd)) {
    size_t taken = room(n);
    if (!taken) return refuse();
    n = taken;
  }
  return next<ssize_t (*)(int, const void*, size_t)>("write")(fd, data, n);
}
int mkdir(const char* path, mode_t mode) {
  if (inside(path) && full()) return refuse();
  return next<int (*)(const char*, mode_t)>("mkdir")(path, mode);
}
int rename(const char* from, const char* to) {
  if (read_only(from) || read_only(to)) return refuse();
  return next<int (*)(const char*, const char*)>("rename")(from, to);
}
int unlink(const char* path) {
  if (read_only(path)) return refuse();
  return next<int (*)(const char*)>("unlink")(path);
}
int rmdir(const char* path) {
  if (read_only(path)) return refuse();
  return next<int (*)(const char*)>("rmdir")(path);
}
}
