#pragma once

// Engines that run the reads and writes of a SwapFile: io_uring, or threads if the kernel lacks or forbids
// io_uring.

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
  int error = 0;                 // an errno, or kEndOfFile if a read met the end of the file
  bool finished = false;         // set by the SwapFile at the end
  int64_t delay_ns[2] = {0, 0};  // delay in tests: seconds and nanoseconds, the layout that io_uring reads
  std::optional<ssize_t> failure = std::nullopt;  // injected result in tests
};
inline constexpr int kEndOfFile = -1;
inline constexpr int64_t kAtOnce = int64_t{1} << 30;  // bytes per system call: half of the kernel's limit

/// Records the result of a system call: a number of bytes, or a negative errno. Returns true if the transfer
/// is over. A short transfer continues from a multiple of `alignment`.
bool advance(Transfer& transfer, ssize_t result, int64_t alignment);

class Engine {
 public:
  using Finished = std::function<void(Transfer&)>;  // called on an engine thread at the end of a transfer
  virtual ~Engine() = default;                      // destructor: waits until all transfers have finished
  virtual void submit(Transfer& transfer) = 0;
  /// Closes inherited descriptors in a forked child, which must not destroy what threads share.
  virtual void close_inherited() {}
};

/// Returns an io_uring engine, or null if this build or this kernel has no io_uring.
ProcessOwned<Engine> io_uring_engine(int fd, int64_t alignment, Engine::Finished finished);
ProcessOwned<Engine> thread_engine(int fd, int64_t alignment, Engine::Finished finished);

}  // namespace shoestring::offload::io
