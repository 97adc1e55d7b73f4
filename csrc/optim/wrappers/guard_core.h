#pragma once

// The implementation of Guard, for both languages.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <shoestring/optim/guard.h>

#include "offload/copy_lane.h"
#include "offload/host_memory.h"

namespace shoestring::optim::detail {

using at::Tensor;

/// Judges steps. A step has the calls review(), judge() and record(), or review() and drop().
class GuardCore {
 public:
  explicit GuardCore(GuardOptions options);

  /// Adds a loss to those of the coming step.
  void watch(const Tensor& loss);
  /// Acts on the step that record() has told of last, if that has not happened yet: raises, or returns
  /// whether the last copy is to be restored. The host waits for that step alone.
  bool review();
  /// Returns 1 if the coming step is bad and 0 otherwise, as fp32, on the device of the losses or else of the
  /// gradients. The gradients may be none, if others look at them.
  Tensor judge(const std::vector<Tensor>& gradients);
  /// Tells whether the optimizer has skipped the step (1) or not (0). The result of judge() may be told, or a
  /// tensor that is 1 in more cases.
  void record(const Tensor& skipped);
  /// Ends a step without a judgement.
  void drop();

  /// Returns whether weights and state are to be copied before this step, if it is good.
  bool is_copy_due() const;
  void copied();

  int64_t steps() const { return steps_; }
  int64_t rollbacks() const { return rollbacks_; }
  const std::vector<BadStep>& bad_steps() const { return bad_; }
  TensorDict state();
  void load_state(const TensorDict& state);

 private:
  // The numbers that the host learns about a step: loss, mean and deviation of the losses before it, and
  // whether it was skipped.
  struct Pending {
    int64_t step;
    bool has_loss;
    Tensor numbers;
    offload::FencePtr done;
  };
  void read();

  const GuardOptions options_;
  Tensor sum_;  // of the losses of the coming step; undefined without one
  int64_t losses_ = 0;
  Tensor loss_;        // the mean of the losses of the step that judge() has seen
  Tensor statistics_;  // fp32 (3,): number, mean and variance of the good losses
  std::unique_ptr<offload::HostMemory> memory_;
  std::optional<Pending> pending_;
  bool is_due_ = false;  // whether review() has yet to act on the last step that was read
  std::string last_;     // describes the last bad step
  int64_t steps_ = 0, rollbacks_ = 0, in_a_row_ = 0;
  int64_t copied_at_ = -1, restored_ = 0;  // the step of the last copy, and how often it has been restored
  std::vector<BadStep> bad_;
};

}  // namespace shoestring::optim::detail
