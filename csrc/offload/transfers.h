#pragma once

// Engines that run the reads and writes of a SwapFile. The engine uses io_uring, or threads if the Linux
// kernel lacks or forbids io_uring.

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
  int error = 0;  // result of the transfer: 0, an errno, or kEndOfFile if a read met the end of the file
  bool finished = false;  // true once the transfer is over; set by the SwapFile
  // delay injected by tests: seconds and nanoseconds, as io_uring's timeout operation expects them
  int64_t delay_ns[2] = {0, 0};
  std::optional<ssize_t> failure = std::nullopt;  // result injected by tests, in place of the real one
};
inline constexpr int kEndOfFile = -1;
// largest number of bytes per system call: half of the kernel's limit
inline constexpr int64_t kAtOnce = int64_t{1} << 30;

/// Updates a transfer after a system call, whose result is a number of bytes or a negative errno. Returns
/// true if the transfer is over. Otherwise the rest must be transferred, from a multiple of `alignment` on.
bool advance(Transfer& transfer, ssize_t result, int64_t alignment);

class Engine {
 public:
  // Callback when a transfer is over; it runs on one of the engine's threads.
  using Finished = std::function<void(Transfer&)>;
  virtual ~Engine() = default;  // the destructor waits until all transfers have finished
  virtual void submit(Transfer& transfer) = 0;
  /// Closes inherited file descriptors in a forked child. The child must not destroy the engine, whose
  /// threads are in the parent.
  virtual void close_inherited() {}
};

/// Returns an io_uring engine, or null if this build or this Linux kernel has no io_uring.
ProcessOwned<Engine> io_uring_engine(int fd, int64_t alignment, Engine::Finished finished);
/// Returns an engine whose threads read and write, for systems without io_uring.
ProcessOwned<Engine> thread_engine(int fd, int64_t alignment, Engine::Finished finished);

}  // namespace shoestring::offload::io
