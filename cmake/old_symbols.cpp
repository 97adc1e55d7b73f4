// Old versions of symbols of glibc and libstdc++ for builds with SHOESTRING_PORTABLE=ON (see Portable.cmake).
// The linker's option --wrap=f sends each reference to f to __wrap_f, which is defined here.

#include <cerrno>
#include <ctime>
#include <new>

#include <pthread.h>
#include <sys/stat.h>

// Defines __wrap_<symbol> as a jump to another symbol of a given version, which has the same arguments.
#define SHOESTRING_JUMP(symbol, old, version)                \
  asm(".pushsection .text\n"                                 \
      ".symver shoestring_old_" #symbol ", " old "@" version \
      "\n"                                                   \
      ".globl __wrap_" #symbol                               \
      "\n"                                                   \
      ".hidden __wrap_" #symbol                              \
      "\n"                                                   \
      ".type __wrap_" #symbol                                \
      ", @function\n"                                        \
      "__wrap_" #symbol                                      \
      ":\n"                                                  \
      "jmp shoestring_old_" #symbol                          \
      "@PLT\n"                                               \
      ".size __wrap_" #symbol ", .-__wrap_" #symbol          \
      "\n"                                                   \
      ".popsection\n")

// glibc 2.29 stopped calling the SVID error handler in these functions. Their results are the same.
SHOESTRING_JUMP(exp, "exp", "GLIBC_2.2.5");
SHOESTRING_JUMP(log, "log", "GLIBC_2.2.5");
SHOESTRING_JUMP(pow, "pow", "GLIBC_2.2.5");

// GCC 12 gave std::condition_variable::wait a new version, since glibc 2.34 has no separate libpthread.
SHOESTRING_JUMP(_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,
                "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE", "GLIBCXX_3.4.11");

// glibc moved these functions into libc.so, with new versions, in 2.32 and 2.34.
SHOESTRING_JUMP(pthread_sigmask, "pthread_sigmask", "GLIBC_2.2.5");
SHOESTRING_JUMP(pthread_mutex_trylock, "pthread_mutex_trylock", "GLIBC_2.2.5");
SHOESTRING_JUMP(dlopen, "dlopen", "GLIBC_2.2.5");
SHOESTRING_JUMP(dlsym, "dlsym", "GLIBC_2.2.5");
SHOESTRING_JUMP(dlclose, "dlclose", "GLIBC_2.2.5");

// std::stringbuf::str() const & of C++20 does what str() const of C++11 does.
SHOESTRING_JUMP(_ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv,
                "_ZNKSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv", "GLIBCXX_3.4.21");

// The constructor of C++20 that moves a string. The one of C++11 copies it.
SHOESTRING_JUMP(
    _ZNSt7__cxx1119basic_istringstreamIcSt11char_traitsIcESaIcEEC1EONS_12basic_stringIcS2_S3_EESt13_Ios_Openmode,
    "_ZNSt7__cxx1119basic_istringstreamIcSt11char_traitsIcESaIcEEC1ERKNS_12basic_stringIcS2_S3_EESt13_Ios_"
    "Openmode",
    "GLIBCXX_3.4.21");

// Inline functions of libstdc++ call this function of GCC 12 for an array whose size overflows.
extern "C" [[noreturn]] void __wrap__ZSt28__throw_bad_array_new_lengthv() {
  throw std::bad_array_new_length();
}

// Inline functions of libstdc++ read this variable of glibc 2.32 and leave out atomic instructions if it is
// true.
asm(".pushsection .rodata\n"
    ".globl __libc_single_threaded\n"
    ".hidden __libc_single_threaded\n"
    ".type __libc_single_threaded, @object\n"
    "__libc_single_threaded: .byte 0\n"
    ".size __libc_single_threaded, 1\n"
    ".popsection\n");

// Before glibc 2.33, stat and fstat were inline functions that called these, with the version of struct stat
// first.
extern "C" int shoestring_old_xstat(int version, const char* path, struct stat* result);
extern "C" int shoestring_old_fxstat(int version, int descriptor, struct stat* result);
asm(".symver shoestring_old_xstat, __xstat@GLIBC_2.2.5");
asm(".symver shoestring_old_fxstat, __fxstat@GLIBC_2.2.5");

namespace {
constexpr int kStatVersion = 1;  // _STAT_VER of x86-64
}  // namespace

extern "C" int __wrap_stat(const char* path, struct stat* result) {
  return shoestring_old_xstat(kStatVersion, path, result);
}

extern "C" int __wrap_fstat(int descriptor, struct stat* result) {
  return shoestring_old_fxstat(kStatVersion, descriptor, result);
}

// glibc 2.30 has pthread_cond_clockwait. Before, std::condition_variable waited until a time of the realtime
// clock.
extern "C" int __wrap_pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                                             clockid_t clock, const timespec* end) {
  timespec now{}, realtime{};
  if (clock_gettime(clock, &now) != 0 || clock_gettime(CLOCK_REALTIME, &realtime) != 0) return EINVAL;
  constexpr long kSecond = 1'000'000'000;
  realtime.tv_sec += end->tv_sec - now.tv_sec;
  realtime.tv_nsec += end->tv_nsec - now.tv_nsec;
  if (realtime.tv_nsec < 0) {
    realtime.tv_nsec += kSecond;
    --realtime.tv_sec;
  } else if (realtime.tv_nsec >= kSecond) {
    realtime.tv_nsec -= kSecond;
    ++realtime.tv_sec;
  }
  if (realtime.tv_sec < 0) return ETIMEDOUT;
  return pthread_cond_timedwait(condition, mutex, &realtime);
}
