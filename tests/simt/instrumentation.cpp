// The functions that the compiler calls before each load and store of a kernel, and a signal handler for
// misaligned wide accesses.

#include <dlfcn.h>
#include <signal.h>
#include <ucontext.h>

#include <cstdio>
#include <cstring>

#include "internal.h"

namespace simt {

std::string text_of(const Place& place) {
  if (place.code == nullptr) return simt::text_of(place.where);
  Dl_info info;
  if (dladdr(place.code, &info) == 0) return "?";
  char command[4096];
  std::snprintf(command, sizeof command, "addr2line -i -e '%s' %p 2>/dev/null", info.dli_fname,
                reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(place.code) - 1 -
                                        reinterpret_cast<uintptr_t>(info.dli_fbase)));
  // addr2line prints the line of the access and of each function into which it was inlined. Choose the
  // innermost line that belongs to a kernel and not to a helper.
  std::string best;
  if (FILE* pipe = popen(command, "r")) {
    char text[4096];
    while (std::fgets(text, sizeof text, pipe)) {
      // Cut off a suffix such as "(discriminator 3)".
      const std::string line = relative(std::string(text, std::strcspn(text, " \n")));
      if (best.empty() || best.find("/common/") != std::string::npos) best = line;
    }
    pclose(pipe);
  }
  return best;
}

namespace {

struct sigaction before;

// Handles the fault of a misaligned access of more than 16 bytes. All other invalid accesses are detected
// before they happen. For such wide accesses, the compiler reports only pieces of 16 bytes, without their
// alignment.
void on_fault(int, siginfo_t*, void* context) {
  // If no kernel runs, the fault is not the emulator's: restore the previous handler.
  if (!in_kernel()) {
    sigaction(SIGSEGV, &before, nullptr);
    return;
  }
#if defined(__x86_64__)
  const auto code = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
  const auto code = static_cast<ucontext_t*>(context)->uc_mcontext.pc;
#endif
  const Place place{reinterpret_cast<const void*>(code + 1), {}};
  fail("misaligned: access of more than 16 bytes at " + text_of(place));
}

}  // namespace

CaughtFaults::CaughtFaults() {
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  // The handler is left by a jump, so its signal must not stay blocked.
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &before);
}
CaughtFaults::~CaughtFaults() { sigaction(SIGSEGV, &before, nullptr); }

}  // namespace simt

#define SIMT_ACCESSES(SIZE)                                                 \
  void __tsan_read##SIZE(void* p) {                                         \
    simt::check_aligned(p, SIZE, false, {__builtin_return_address(0), {}}); \
  }                                                                         \
  void __tsan_write##SIZE(void* p) {                                        \
    simt::check_aligned(p, SIZE, true, {__builtin_return_address(0), {}});  \
  }                                                                         \
  void __tsan_unaligned_read##SIZE(void* p) {                               \
    simt::check(p, SIZE, false, false, {__builtin_return_address(0), {}});  \
  }                                                                         \
  void __tsan_unaligned_write##SIZE(void* p) {                              \
    simt::check(p, SIZE, true, false, {__builtin_return_address(0), {}});   \
  }

extern "C" {
void __tsan_init() {}
SIMT_ACCESSES(1)
SIMT_ACCESSES(2)
SIMT_ACCESSES(4)
SIMT_ACCESSES(8)
SIMT_ACCESSES(16)
void __tsan_read_range(void* p, size_t n) {
  simt::check(p, n, false, false, {__builtin_return_address(0), {}});
}
void __tsan_write_range(void* p, size_t n) {
  simt::check(p, n, true, false, {__builtin_return_address(0), {}});
}

// Called by code compiled with -fsanitize=bounds, for an index beyond the end of an array whose size the
// compiler knows.
struct BoundsCheck {
  const char* file;
  uint32_t line, column;
};
void __ubsan_handle_out_of_bounds(BoundsCheck* check, void* index) {
  if (!simt::in_kernel()) return;
  simt::fail("out of bounds: index " + std::to_string(reinterpret_cast<intptr_t>(index)) +
             " of an array at " + simt::relative(check->file) + ":" + std::to_string(check->line));
}
}
