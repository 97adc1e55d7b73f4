#pragma once

// Asynchronous copies between host and device on a thread (and a CUDA stream) of their own.

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include "offload/own_process.h"

namespace shoestring::offload {

/// Returns this thread's current stream of the device, or nothing for the CPU.
std::optional<c10::Stream> current_stream(c10::Device device);

class Fence;
using FencePtr = std::shared_ptr<Fence>;

/// A point in the work of a lane or of a stream. Work is first issued; a GPU completes it some time later.
class Fence {
 public:
  /// Returns a fence for work that has not been issued yet.
  static FencePtr make() { return FencePtr(new Fence, DeleteInOwnProcess()); }
  /// Returns a fence for all work that this thread has given to the device so far.
  static FencePtr now(c10::Device device);

  /// Blocks the host until the work is issued; on the CPU, until it is done. Rethrows an error of the work.
  /// Raises in a forked child.
  void wait_issued() const;
  /// Makes the stream wait for the work, while the host only waits until it is issued. Without a stream,
  /// equals wait_issued.
  void block(const std::optional<c10::Stream>& stream) const;
  /// Blocks the host until the work is done.
  void synchronize() const;
  /// Returns whether the work is done or has failed.
  bool is_done() const;

 private:
  friend class CopyLane;
  Fence() = default;
  void issue(std::optional<c10::Event> event, std::exception_ptr error);

  const OwnProcess process_;
  mutable std::mutex mutex_;
  mutable std::condition_variable issued_changed_;
  bool issued_ = false;
  std::exception_ptr error_;
  std::optional<c10::Event> event_;
};

/// Runs copies one after the other while the computation goes on: on a thread, and on a GPU in a stream of
/// its own.
class CopyLane {
 public:
  /// threads: number of threads that operators in a copy may use; 0: PyTorch's default.
  explicit CopyLane(c10::Device device, int threads = 1) : device_(device), threads_(threads) {}
  /// Waits for all copies. A forked child does not wait, since it has no such thread.
  ~CopyLane();
  CopyLane(const CopyLane&) = delete;
  CopyLane& operator=(const CopyLane&) = delete;

  /// Runs `copy` after these fences, with the lane's stream as the current stream. `copy` must not need the
  /// GIL, and must not free memory that a stream may still use. Raises in a forked child.
  FencePtr run(std::vector<FencePtr> after, std::function<void()> copy);

 private:
  struct Job {
    std::vector<FencePtr> after;
    std::function<void()> copy;
    FencePtr fence;
  };
  struct Worker {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Job> jobs;
    bool ending = false;
    std::thread thread;  // runs the jobs; started by the first one
  };
  void work();

  const OwnProcess process_;
  const c10::Device device_;
  const int threads_;
  const ProcessOwned<Worker> worker_ = make_process_owned<Worker>();
};

}  // namespace shoestring::offload
