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

namespace shoestring {

/// The stream of the device that this thread works on; none on the CPU.
std::optional<c10::Stream> current_stream(c10::Device device);

/// A point in the work of a lane or of a stream. Work is issued, and on a GPU done some time after.
class Fence {
 public:
  /// What this thread has given the device to do so far.
  static std::shared_ptr<Fence> now(c10::Device device);

  /// On the host until the work is issued, on the CPU done; throws what has failed.
  void wait_issued() const;
  /// The stream waits, the host only for what wait_issued waits for. Without a stream: wait_issued.
  void block(const std::optional<c10::Stream>& stream) const;
  /// On the host until the work is done.
  void synchronize() const;
  /// Or has failed.
  bool is_done() const;

 private:
  friend class CopyLane;
  void issue(std::optional<c10::Event> event, std::exception_ptr error);

  mutable std::mutex mutex_;
  mutable std::condition_variable issued_changed_;
  bool issued_ = false;
  std::exception_ptr error_;
  std::optional<c10::Event> event_;
};

using FencePtr = std::shared_ptr<Fence>;

/// Copies, one after the other, beside the computation: a thread, and on a GPU a stream of its own.
class CopyLane {
 public:
  /// threads: that operators in it may use; 0: as many as elsewhere.
  explicit CopyLane(c10::Device device, int threads = 1) : device_(device), threads_(threads) {}
  /// After all copies.
  ~CopyLane();
  CopyLane(const CopyLane&) = delete;
  CopyLane& operator=(const CopyLane&) = delete;

  /// Runs `copy` after these fences, with the lane's stream as the current one. It must not need Python's lock, nor give
  /// back memory that a stream may still use.
  FencePtr run(std::vector<FencePtr> after, std::function<void()> copy);

 private:
  struct Job {
    std::vector<FencePtr> after;
    std::function<void()> copy;
    FencePtr fence;
  };
  void work();

  const c10::Device device_;
  const int threads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool ending_ = false;
  std::thread thread_;  // from the first job on
};

}  // namespace shoestring
