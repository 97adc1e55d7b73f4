#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <array>
#include <chrono>
#include <vector>

/// The figures of one training step.
struct Reading {
  int64_t step;  // number of completed steps
  double loss, norm, seconds;
  double data_seconds;  // the time for which the step waited for data
};

/// Collects losses and gradient norms on the device, and reads those of several steps at once.
///
/// The steps between two reads form an interval. At its end, the values are copied to pinned host memory
/// without waiting. They are read when the next interval has ended: the copy has then long finished, and the
/// device has work enqueued. On the CPU, an interval is read at its own end.
class Readings {
 public:
  /// interval: number of steps between reads. micro_batches: number of losses of a step.
  /// norm_must_be_finite: whether bad() also reacts to the norm. Under loss scaling, a norm that is not
  /// finite is normal.
  Readings(at::Device device, int64_t interval, int64_t micro_batches, bool norm_must_be_finite);

  /// Adds the loss of a micro-batch, or the gradient norm of a step: a scalar on the device.
  void add_loss(const at::Tensor& loss);
  void add_norm(const at::Tensor& norm);
  /// Returns one fp32 element on the device: 0, or 1 from the first step on that has a loss or a norm that is
  /// not finite. A step that takes it as found_inf changes nothing from then on, without a read by the host.
  const at::Tensor& bad() const { return bad_; }

  void end_step(int64_t step, double data_seconds);
  bool is_full() const { return buffers_[current_].waiting.size() == static_cast<size_t>(interval_); }
  /// Ends an interval. Returns the readings of the interval before it; with `wait`, all that are left. Each
  /// reading has the mean seconds of a step in its interval.
  std::vector<Reading> end_interval(bool wait);
  /// Leaves the time since the last interval, such as that of a checkpoint, out of the next interval.
  void restart_clock() { began_ = std::chrono::steady_clock::now(); }

 private:
  struct Buffer {
    at::Tensor values, host;       // (interval, micro_batches + 1): the losses of a step and its norm
    std::vector<Reading> waiting;  // readings that have not been filled in yet
  };
  void add(const at::Tensor& value, int64_t column, bool must_be_finite);
  void read(Buffer& buffer, c10::Event* copied, std::vector<Reading>& to);

  int64_t interval_, micro_batches_, losses_ = 0;
  bool norm_must_be_finite_, late_;
  std::array<Buffer, 2> buffers_;  // one collects an interval while the other waits to be read
  std::vector<c10::Event> copied_;
  size_t current_ = 0;
  at::Tensor bad_;
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};
