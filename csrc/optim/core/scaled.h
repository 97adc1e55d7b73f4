#pragma once

// Steps with the gradients of a scaled loss, for optimizers of every class.

#include <shoestring/optim/wrappers.h>

#include "optim/rule.h"

namespace shoestring::optim::detail {

/// Converts a tensor with one number to fp32 on `device`. Does not wait for a GPU, unless `device` is the
/// CPU.
inline Tensor number_on(at::Device device, const Tensor& t) {
  return t.to(device, at::kFloat, /*non_blocking=*/!device.is_cpu());
}

/// Returns the optimizer that divides the gradients within its step: `optimizer` itself, or the optimizer
/// that SAM wraps. Null if the gradients must be divided before the step.
LowMemoryOptimizer* divides_within_step(torch::optim::Optimizer& optimizer);

/// Returns the gradients of an optimizer's parameters; of sparse ones the values.
std::vector<Tensor> gradients_of(const torch::optim::Optimizer& optimizer);

/// Divides the gradients by `scale` in place. Returns 1 if a gradient is not finite and 0 otherwise, as fp32
/// on the device of `scale`. Undefined if there are no gradients. Raises if a gradient is fp16.
Tensor unscale(const torch::optim::Optimizer& optimizer, const Tensor& scale);

/// Returns 1 if one of two results of unscale is 1. An undefined result counts as 0.
Tensor either(const Tensor& found_inf, const Tensor& other);

/// Takes or skips a step with gradients of a scaled loss; see LowMemoryOptimizer::scaled_step. If the
/// optimizer does not divide within its step, divides grad() first and reads on the host whether to step.
Tensor scaled_step(torch::optim::Optimizer& optimizer, const Tensor& scale, const Tensor& found_inf);

}  // namespace shoestring::optim::detail
