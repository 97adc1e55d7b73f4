#pragma once

// The buffers and the order of events of data::Prefetcher, for a reader thread of C++ or of Python.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <vector>

#include <shoestring/data/data.h>

#include "offload/copy_lane.h"
#include "offload/host_memory.h"

namespace shoestring::data {

/// A ring of slots, each with pinned host memory and device memory for one batch. A reader thread fills the
/// slots in order, and a consumer thread takes the batches. On the CPU, a slot only holds the reader's
/// tensors.
///
/// Each slot alternates between two fences. `copied` follows the copy to the device on the ring's stream: the
/// consumer's stream waits for it, and the reader waits for it before it writes to the host memory again.
/// `released` follows the consumer's work on the batch: the ring's stream waits for it before the next copy.
class PrefetchRing {
 public:
  PrefetchRing(c10::Device device, int64_t depth, int64_t start, std::optional<int64_t> stop, bool poison);
  /// Waits until copies that have begun are done. The reader thread must have ended.
  ~PrefetchRing();
  PrefetchRing(const PrefetchRing&) = delete;
  PrefetchRing& operator=(const PrefetchRing&) = delete;

  // ---- for the reader thread

  /// Waits for a free slot, and returns the number of the batch to read. Returns nullopt if no batch is
  /// wanted any more. Limits the operators of the calling thread to one thread.
  std::optional<int64_t> claim();
  /// Returns an uninitialised tensor in the claimed slot's host memory, or in ordinary memory if there is no
  /// room in it.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype);
  /// Copies the claimed batch to the device. Raises if a tensor is not dense or not on the CPU.
  void put(Batch batch);
  /// Declares that there is no batch of the claimed number, nor of a later one.
  void finish() { end(nullptr); }
  /// Declares that reading the claimed batch has failed.
  void fail(std::exception_ptr error) { end(std::move(error)); }

  // ---- for the consumer, one thread at a time

  /// Takes back the previous batch. Returns whether next() would not wait now, or within `seconds`.
  bool wait(double seconds);
  /// See Prefetcher::next(). After close(), raises also for a batch that has been read.
  std::optional<Batch> next();

  // ---- for any thread

  int64_t position() const { return position_; }
  double seconds_waited() const { return seconds_waited_; }

  /// Makes claim() return nullopt and next() raise from now on, also in a thread that waits in it. position()
  /// stays the same from then on. Has no effect in a forked child.
  void close();

 private:
  using Clock = std::chrono::steady_clock;

  struct Slot {
    at::Tensor host, device;   // flat memory in bytes; undefined before the first batch
    int64_t used = 0;          // bytes of `host` in which empty() has returned tensors
    int64_t wanted = 0;        // bytes of all tensors that empty() has returned
    offload::FencePtr copied;  // null before the first copy
    offload::FencePtr released;
    Batch batch;
    Clock::time_point claimed_at;
  };

  Slot& slot_of(int64_t number) { return slots_[static_cast<size_t>(number) % slots_.size()]; }
  void check(const Batch& batch) const;
  Batch upload(Slot& slot, const Batch& batch);
  void end(std::exception_ptr error);
  void give_back();
  bool is_ready() const { return closed_ || ended_ || position_ < read_; }

  const offload::OwnProcess process_;
  const c10::Device device_;
  const std::optional<int64_t> stop_;
  const bool poison_;
  std::optional<c10::Stream> stream_;  // the stream of the copies; none for the CPU
  offload::HostMemory memory_;
  std::vector<Slot> slots_;
  int64_t largest_ = 1;  // bytes of the largest batch

  // written by the consumer only; atomic, because other threads read them, also after a fork
  std::atomic<int64_t> position_;
  std::atomic<double> seconds_waited_ = 0;
  bool is_held_ = false;  // whether the consumer uses the batch before position_
  std::mutex consumer_;   // held in next()

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t read_;          // number of the batch that the reader reads, or will read
  int64_t returned_;      // number of the oldest batch whose slot has not been taken back
  int64_t claimed_ = -1;  // number of the last claimed batch
  bool ended_ = false, closed_ = false;
  std::exception_ptr error_;  // the reason why reading has ended, if it failed
};

}  // namespace shoestring::data
