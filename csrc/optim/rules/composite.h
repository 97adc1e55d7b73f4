#pragma once

// Helpers for optimizers whose step is not elementwise, such as LAMB and Muon. Such an optimizer steps one
// parameter at a time, by calling other operators on the parameter's slice of the optimizer state. No
// function here reads a tensor's values on the host, so one implementation serves every device.

#include <functional>
#include <utility>
#include <vector>

#include <c10/util/accumulate.h>

#include "optim/inner.h"
#include "optim/optimizer.h"
#include "optim/split/all_reduce.h"
#include "optim/split/split_params.h"

namespace shoestring::optim::ops {

using detail::Partial;

/// A parameter that has a gradient, with its slice of the optimizer state that an operator call receives.
class Share {
 public:
  /// `before` is a copy of the step counters of the operator call. Each inner operator increments the step
  /// counter that it receives, so all inner operators except the last receive the copy.
  Share(const Call& call, const Stepped& stepped, const Tensor& before);

  const Call& call;
  int64_t index;  // index of the parameter in call.params
  Tensor param, grad, step, before;

  Tensor of(const Tensor& arena) const;
  OptionalTensor of(const OptionalTensor& arena) const;

  /// Returns an uninitialised fp32 tensor with the parameter's shape.
  Tensor empty() const;

  /// Returns the arguments of another operator, with the options `options`, for one parameter: `result`,
  /// whose gradient is `grad`. `options` must exist until the operator has been called.
  Arguments arguments(const LowMemoryOptions& options, const Tensor& result, const Tensor& grad,
                      const Tensor& step) const;

  /// Passes this parameter's slices of all moments (and of their scales) to another operator, which has the
  /// same number of moments in the same order.
  void pass_moments(Arguments& inner) const;

  /// Passes the arguments that concern the gradient: maximize, grad_scale, clip_coef and accumulated. Pass
  /// them to only one inner operator of a step, so that they are applied once.
  void pass_gradient(Arguments& inner) const;

  /// Returns the gradient in fp32. Adds the accumulated gradients and sets them to zero, and applies
  /// grad_scale, clip_coef and maximize.
  Tensor gradient() const;

  /// Returns the Euclidean norm of the parameter as one fp32 element. For bf16 weights with a 16-bit
  /// remainder, the norm includes the remainder.
  Tensor weight_norm() const;
  Tensor weight() const;  // returns the parameter in fp32, including its remainder

  /// Computes mean += weight * (fresh - mean) in place. Changes nothing if found_inf is not zero, because the
  /// optimizer step is then skipped.
  void advance(const Tensor& mean, const Tensor& fresh, const Tensor& weight) const;

  /// Calls the operator _apply_ on the parameter: param = param * (1 - lr * weight_decay) - lr * factor *
  /// update. `lr` (one element) replaces the lr of the operator call. Without `factor`, the factor is 1. With
  /// `maximize`, the update is added.
  void apply(const Tensor& update, double weight_decay, const OptionalTensor& factor = {},
             const OptionalTensor& lr = {}, bool maximize = false) const;

 private:
  int64_t block_, blocks_, total_;
};

/// Checks all arguments of the operator call, and returns a Share (the parameter and its slice of the state)
/// for each parameter that has a gradient.
std::vector<Share> shares(const Call& call);

/// Steps the parameters of a call in stages. A stage gets the data of one parameter's step, which begin as
/// Step{share}, and returns what has to be combined, in place, before the next stage. Parameters that
/// processes have split take each stage together. Any other parameter takes all stages before the next
/// parameter begins, so that only one at a time has temporary memory.
template <class Step>
void in_stages(const Call& call, const std::vector<std::function<Partial(Step&)>>& stages) {
  const std::vector<Share> all = shares(call);
  std::vector<Step> split;
  for (const Share& s : all) {
    if (c10::multiply_integers(whole_sizes(s.param)) == 0) {
      s.apply(s.empty(), 0);  // counts the step
    } else if (split_of(s.param) != nullptr) {
      split.push_back(Step{s});
    } else {
      Step step{s};
      for (const auto& stage : stages) stage(step);
    }
  }
  if (split.empty()) return;
  for (const auto& stage : stages) {
    std::vector<Partial> parts;
    for (Step& step : split) parts.push_back(stage(step));
    detail::combine(parts, *split_of(split[0].s.param));
  }
}

}  // namespace shoestring::optim::ops
