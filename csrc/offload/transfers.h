#pragma once

// What carries out the reads and writes of a SwapFile: io_uring, or threads where the kernel has or allows
// none.

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <optional>

#include "offload/own_process.h"

namespace shoestring::offload::io {

struct Transfer {
  bool is_write;
  int64_t offset;
  char* memory;
  int64_t size;
  int64_t done = 0;
  int error = 0;                                  // an errno; kEndOfFile where a read met the end
  bool finished = false;                          // the owner's
  int64_t delay_ns[2] = {0, 0};                   // a test's: seconds and nanoseconds, as io_uring reads them
  std::optional<ssize_t> failure = std::nullopt;  // a test's
};
inline constexpr int kEndOfFile = -1;
inline constexpr int64_t kAtOnce = int64_t{1} << 30;  // bytes: half of what a system call takes

/// What a system call (bytes, or minus an errno) has brought; true where nothing is left to do. Short
/// transfers go on, from a multiple of `alignment`.
bool advance(Transfer& transfer, ssize_t result, int64_t alignment);

class Engine {
 public:
  using Finished = std::function<void(Transfer&)>;  // called in a thread of the engine's
  virtual ~Engine() = default;                      // after all transfers have finished
  virtual void submit(Transfer& transfer) = 0;
  /// In a forked child, which does not destroy what threads share: closes the descriptors that it has
  /// inherited.
  virtual void close_inherited() {}
};

/// Null where this build or this kernel has no io_uring.
ProcessOwned<Engine> io_uring_engine(int fd, int64_t alignment, Engine::Finished finished);
ProcessOwned<Engine> thread_engine(int fd, int64_t alignment, Engine::Finished finished);

}  // namespace shoestring::offload::io
