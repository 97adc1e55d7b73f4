// A preloaded library (LD_PRELOAD) that kills a process right before its n-th counted system call. It counts
// the calls that change a name or the length of a file, or that make such a change durable. A forked process
// calls kill_at() to count its own calls, and its parent reads the number of calls.

#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <new>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

struct Shared {  // The counters are in memory that this process shares with the processes that it forks.
  std::atomic<long> calls{0}, last{0};
  std::atomic<pid_t> process{0};
  std::atomic<bool> exchanges{true};
};

Shared& shared() {
  static Shared* const memory =
      new (::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Shared;
  return *memory;
}

__attribute__((constructor)) void map_before_fork() { shared(); }

void count() {
  if (shared().process == ::getpid() && ++shared().calls == shared().last) ::kill(::getpid(), SIGKILL);
}

}  // namespace

/// Starts counting the system calls of this process; the n-th call kills it, or none if n is 0. If
/// `exchanges` is false, renameat2 fails as on a file system without RENAME_EXCHANGE.
EXPORTED void kill_at(long n, bool exchanges) {
  shared().calls = 0;
  shared().last = n;
  shared().exchanges = exchanges;
  shared().process = ::getpid();
}

EXPORTED long calls_counted() { return shared().calls; }

// Defines a function that counts a call of the system function `name` and then calls it. It is declared under
// another C++ name, because the system headers declare `name` with an exception specification.
#define COUNTED(name, parameters, arguments)                                                 \
  EXPORTED int counted_##name parameters asm(#name);                                         \
  EXPORTED int counted_##name parameters {                                                   \
    static const auto next = reinterpret_cast<int(*) parameters>(::dlsym(RTLD_NEXT, #name)); \
    count();                                                                                 \
    return next arguments;                                                                   \
  }

COUNTED(rename, (const char* from, const char* to), (from, to))
COUNTED(renameat, (int a, const char* from, int b, const char* to), (a, from, b, to))
COUNTED(fsync, (int fd), (fd))
COUNTED(fdatasync, (int fd), (fd))
COUNTED(mkdir, (const char* path, mode_t mode), (path, mode))
COUNTED(mkdirat, (int fd, const char* path, mode_t mode), (fd, path, mode))
COUNTED(unlink, (const char* path), (path))
COUNTED(unlinkat, (int fd, const char* path, int flags), (fd, path, flags))
COUNTED(rmdir, (const char* path), (path))
COUNTED(remove, (const char* path), (path))
COUNTED(link, (const char* from, const char* to), (from, to))
COUNTED(linkat, (int a, const char* from, int b, const char* to, int flags), (a, from, b, to, flags))
COUNTED(symlink, (const char* to, const char* path), (to, path))
COUNTED(symlinkat, (const char* to, int fd, const char* path), (to, fd, path))
COUNTED(truncate, (const char* path, off_t size), (path, size))
COUNTED(truncate64, (const char* path, off_t size), (path, size))
COUNTED(ftruncate, (int fd, off_t size), (fd, size))
COUNTED(ftruncate64, (int fd, off_t size), (fd, size))

EXPORTED int counted_renameat2(int a, const char* from, int b, const char* to,
                               unsigned flags) asm("renameat2");
EXPORTED int counted_renameat2(int a, const char* from, int b, const char* to, unsigned flags) {
  static const auto next = reinterpret_cast<decltype(&counted_renameat2)>(::dlsym(RTLD_NEXT, "renameat2"));
  if (!shared().exchanges && flags != 0) {
    errno = EINVAL;
    return -1;
  }
  count();
  return next(a, from, b, to, flags);
}
