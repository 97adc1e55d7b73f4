#pragma once

// An optimizer step or a backward pass that failed leaves work undone. These classes finish or drop that
// work.

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "optim/core/arena.h"

namespace shoestring::optim::detail {

/// One call of the optimizer's operator: an arena, the gradients of the arena's parameters, and the
/// accumulated gradients that the operator adds to the gradients.
struct OperatorCall {
  size_t group;
  Arena* arena;
  std::vector<Tensor> grads{};
  Tensor accumulated{};
};

/// Numbers of one element that the operators of a step read; undefined ones have no effect. They divide and
/// multiply the gradients. If found_inf is not zero, the operators skip the step.
struct StepFactors {
  Tensor clip_coef{}, grad_scale{}, found_inf{};
};

/// An optimizer step that is in progress, or that has failed.
struct Step {
  std::vector<OperatorCall> calls{};
  size_t done = 0;  // number of operator calls that have finished
  StepFactors factors{};

  bool is_whole() const { return done == calls.size(); }
  bool has_stepped() const;
};

/// The data that an error has left incomplete: none, the accumulated gradients, or the weights and the
/// optimizer state.
enum class Broken { kNone, kSums, kWeights };

/// Holds what a failed step or backward pass has left, and finishes or drops it.
class UnfinishedStep {
 public:
  explicit UnfinishedStep(Core& core) : core_(core) {}

  Broken broken = Broken::kNone;

  /// Returns whether a step has failed and can be finished.
  bool exists() const { return step_.has_value(); }
  /// Keeps a step that has failed.
  void keep(Step step);
  /// Returns the failed step, if its gradients have not changed since. Otherwise ends it, if there is one.
  std::optional<Step> resume();
  /// Ends a failed step before another step begins. Completes the failed step if it has stepped all
  /// parameters, drops it if it has stepped none, and raises an error otherwise.
  void end();
  /// Does the same, except that it leaves a step that has stepped some parameters as it is.
  void end_unless_partial();
  /// Completes a failed step that has stepped all parameters, before the state is read. Raises if it has
  /// stepped some of them. `what` is the caller's name in the error.
  void settle(const char* what);
  /// Raises if weights or sums of gradients are broken.
  void check_whole(const char* what) const;
  void forget();

 private:
  // The gradients of all parameters, each with its version counter, to detect gradients that have changed
  // since a failed step.
  using Versions = std::vector<std::pair<Tensor, uint32_t>>;
  Versions versions() const;

  Core& core_;
  std::optional<Step> step_;
  Versions gradients_;  // of the failed step
};

/// The unfinished backward passes in which a gradient hook of an optimizer has run, by the ids of autograd's
/// graph tasks. A backward pass can run within another one, for example in a checkpoint that recomputes.
class Backwards : public std::enable_shared_from_this<Backwards> {
 public:
  bool any() const;
  bool has(int task) const;
  /// Adds the running backward pass. If it fails, `after_failure` is called when autograd has ended it.
  void begin(int task, std::function<void()> after_failure);
  /// Returns whether a backward pass has failed since the last call.
  bool take_failure();
  /// Forgets the running passes, so that their failure is none of the optimizer.
  void forget_running();

 private:
  class End;

  mutable std::mutex mutex_;
  std::set<int> open_;
  bool failed_ = false;
};

}  // namespace shoestring::optim::detail
