#pragma once

// Shared parts of the CPU implementations of cross_entropy and linear_cross_entropy.

#include <ATen/core/Tensor.h>

#include "losses/cross_entropy.h"
#include "losses/cross_entropy_table.h"

namespace shoestring::losses {

/// A per-token factor of the gradients: a tensor with one value per token, a scalar for all tokens, or
/// undefined, which counts as 0.
template <class T>
class Factor {
 public:
  Factor(const OptionalTensor& factor, at::ScalarType compute)
      : values_(factor ? factor->to(compute).contiguous() : Tensor()), stride_(factor && factor->dim() != 0) {
  }
  double operator[](int64_t token) const {
    return values_.defined() ? values_.template const_data_ptr<T>()[token * stride_] : 0;
  }

 private:
  Tensor values_;
  int64_t stride_;
};

/// Returns the indices of the rows that are not ignored. Raises for targets that are neither a class nor
/// ignore_index.
std::vector<int64_t> rows_that_count(const RowsProblem& p, const TargetsOnCpu& targets);

/// Builds the parameters that the CPU kernel uses for all rows. bias and class_weights are contiguous and of
/// dtype T, or undefined. total_weight is the sum of the class weights.
template <class T>
kernels::CrossEntropyRule<T> rule_of(const RowsProblem& p, const Tensor& bias, const Tensor& class_weights,
                                     double total_weight) {
  const auto pointer = [](const Tensor& t) { return t.defined() ? t.template const_data_ptr<T>() : nullptr; };
  kernels::CrossEntropyRule<T> rule{};
  static_cast<kernels::CrossEntropyFormula&>(rule) = p.formula();
  rule.logit_scale = 1;
  rule.vocab = p.classes.expect_int();
  rule.bias = pointer(bias);
  rule.class_weights = pointer(class_weights);
  rule.total_weight = class_weights.defined() ? total_weight : static_cast<double>(rule.vocab);
  rule.stats = p.stats;
  return rule;
}

}  // namespace shoestring::losses
