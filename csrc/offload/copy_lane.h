#pragma once

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

/// The stream of the device that this thread works on; none on the CPU.
std::optional<c10::Stream> current_stream(c10::Device device);

class Fence;
using FencePtr = std::shared_ptr<Fence>;

/// A point in the work of a lane or of a stream. Work is issued, and on a GPU done some time after.
class Fence {
 public:
  /// A fence for work that is still to be issued.
  static FencePtr make() { return FencePtr(new Fence, DeleteInOwnProcess()); }
  /// What this thread has given the device to do so far.
  static FencePtr now(c10::Device device);

  /// On the host until the work is issued, on the CPU done; throws what has failed, and in a forked child.
  void wait_issued() const;
  /// The stream waits, the host only for what wait_issued waits for. Without a stream: wait_issued.
  void block(const std::optional<c10::Stream>& stream) const;
  /// On the host until the work is done.
  void synchronize() const;
  /// Or has failed.
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

/// Copies, one after the other, beside the computation: a thread, and on a GPU a stream of its own.
class CopyLane {
 public:
  /// threads: that operators in it may use; 0: as many as elsewhere.
  explicit CopyLane(c10::Device device, int threads = 1) : device_(device), threads_(threads) {}
  /// After all copies. In a forked child, which has no such thread, at once.
  ~CopyLane();
  CopyLane(const CopyLane&) = delete;
  CopyLane& operator=(const CopyLane&) = delete;

  /// Runs `copy` after these fences, with the lane's stream as the current one. It must not need Python's
  /// lock, nor give back memory that a stream may still use. Raises in a forked child.
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
    std::thread thread;  // from the first job on
  };
  void work();

  const OwnProcess process_;
  const c10::Device device_;
  const int threads_;
  const ProcessOwned<Worker> worker_ = make_process_owned<Worker>();
};

}  // namespace shoestring::offload
