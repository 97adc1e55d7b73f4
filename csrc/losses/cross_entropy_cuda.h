#pragma once

// Shared parts of the CUDA implementations of cross_entropy and linear_cross_entropy.

#include <ATen/core/Tensor.h>

#include <array>

#include "losses/cross_entropy.h"
#include "losses/cross_entropy_table.h"

namespace shoestring::losses {

/// Converts the upstream gradients grad_loss, grad_lse and grad_entropy to contiguous tensors of dtype
/// `compute`. Gradients that were not given stay undefined.
inline std::array<Tensor, 3> factors_of(const RowsProblem& p, at::ScalarType compute) {
  std::array<Tensor, 3> found;
  const OptionalTensor* given[] = {&p.grad_loss, &p.grad_lse, &p.grad_entropy};
  for (int i = 0; i < 3; ++i) {
    if (*given[i]) found[i] = (*given[i])->to(compute).contiguous();
  }
  return found;
}

/// The second targets of a call, contiguous, and the parts of the first ones in dtype `compute`. Both are
/// undefined if each row has one target. They must outlive the launches.
struct SecondTargets {
  SecondTargets(const RowsProblem& p, at::ScalarType compute)
      : target2(p.target2 ? p.target2->contiguous() : Tensor()),
        mix(p.mix ? p.mix->to(compute).contiguous() : Tensor()) {}

  /// Passes them to a launch whose first row is row number `begin`.
  void add_to(kernels::CrossEntropyRows& rows, int64_t begin) const {
    if (!target2.defined()) return;
    rows.target2 = target2.const_data_ptr<int64_t>() + begin;
    rows.mix_stride = mix.dim() != 0;
    rows.mix = static_cast<const char*>(mix.const_data_ptr()) + begin * rows.mix_stride * mix.element_size();
  }

  Tensor target2, mix;
};

/// Fills the parameters of a CUDA launch, except for the pointers to logits and results. The tensors are
/// undefined or of the compute dtype (fp32, or fp64 for fp64 inputs), and must outlive the launch.
inline kernels::CrossEntropyRows launch_of(const RowsProblem& p, const std::array<Tensor, 3>& factors,
                                           const Tensor& class_weights, const Tensor& total_weight) {
  const auto pointer = [](const Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; };
  const auto stride = [](const Tensor& t) { return static_cast<int64_t>(t.defined() && t.dim() != 0); };
  kernels::CrossEntropyRows rows{};
  static_cast<kernels::CrossEntropyFormula&>(rows) = p.formula();
  rows.vocab = p.classes.expect_int();
  rows.logit_scale = 1;
  rows.factor = 1;
  rows.ignore_index = p.ignore_index;
  rows.class_weights = pointer(class_weights);
  rows.total_weight = pointer(total_weight);
  rows.grad_loss = pointer(factors[0]);
  rows.grad_lse = pointer(factors[1]);
  rows.grad_entropy = pointer(factors[2]);
  rows.grad_loss_stride = stride(factors[0]);
  rows.grad_lse_stride = stride(factors[1]);
  rows.grad_entropy_stride = stride(factors[2]);
  return rows;
}

}  // namespace shoestring::losses
