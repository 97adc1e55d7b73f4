#pragma once

// Asynchronous copies between host and device, on a separate thread and, with a GPU, on a separate CUDA
// stream.

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

/// Returns the calling thread's current stream of a CUDA device, or nullopt for the CPU.
std::optional<c10::Stream> current_stream(c10::Device device);

class Fence;
using FencePtr = std::shared_ptr<Fence>;

/// Marks a point in the work of a CopyLane or of a CUDA stream, to wait for it. Work is first issued by the
/// host; a GPU completes it some time later.
class Fence {
 public:
  /// Returns a fence for work that a CopyLane has yet to issue.
  static FencePtr make() { return FencePtr(new Fence, DeleteInOwnProcess()); }
  /// Returns a fence for all work that is in this thread's current stream of the device at present.
  static FencePtr now(c10::Device device);

  /// Blocks the host until the fence's work is issued; CPU work is then done. Rethrows an error of the work.
  /// Raises in a forked child.
  void wait_issued() const;
  /// Makes `stream` wait until the fence's work is done, while the host waits only until the work is issued.
  /// Without a stream, does the same as wait_issued().
  void block(const std::optional<c10::Stream>& stream) const;
  /// Blocks the host until the fence's work is done. Rethrows an error of the work.
  void synchronize() const;
  /// Returns whether the fence's work is done or has failed.
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

/// Runs copies one after the other while the computation goes on. A lane has its own thread and, with a GPU,
/// its own stream.
class CopyLane {
 public:
  /// `threads` is the number of threads that operators in a copy may use; 0 means PyTorch's default.
  explicit CopyLane(c10::Device device, int threads = 1) : device_(device), threads_(threads) {}
  /// Waits for all copies. In a forked child it does not wait, since the child has no copying thread.
  ~CopyLane();
  CopyLane(const CopyLane&) = delete;
  CopyLane& operator=(const CopyLane&) = delete;

  /// Runs `copy` on the lane's thread once the fences in `after` are done, with the lane's stream as the
  /// current stream. Returns a fence for the copy. `copy` must not need the GIL, and must not free memory
  /// that a stream may still use. Raises in a forked child.
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
    std::thread thread;  // runs the jobs; started by the first call of run()
  };
  void work();

  const OwnProcess process_;
  const c10::Device device_;
  const int threads_;
  const ProcessOwned<Worker> worker_ = make_process_owned<Worker>();
};

}  // namespace shoestring::offload
