// A library for LD_PRELOAD. Each read of a file at an offset takes 20 ms longer.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>

typedef ssize_t Read(int, void*, size_t, off_t);

ssize_t pread(int fd, void* to, size_t size, off_t offset) {
  usleep(20000);
  return ((Read*)dlsym(RTLD_NEXT, "pread"))(fd, to, size, offset);
}
