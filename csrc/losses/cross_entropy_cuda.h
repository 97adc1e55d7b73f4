#pragma once

// Shared parts of the CUDA implementations of cross_entropy and linear_cross_entropy.

#include <utility>

#include "core/tensors.h"
#include "losses/logit_waves.h"
#include "losses/token_loss.h"

namespace shoestring::losses {

/// The tensors of a problem that the row kernel reads, in the dtypes that it reads. They must outlive the
/// launches.
class RowsOnCuda {
 public:
  /// class_weights is contiguous and of the compute dtype (fp32, or fp64 for fp64 inputs), or undefined.
  RowsOnCuda(const TokenProblem& p, Tensor class_weights)
      : p_(p), target_(p.target.contiguous()),
        target2_(p.options.target2() ? p.options.target2()->contiguous() : Tensor()),
        mix_(computed(p.options.mix())), grad_loss_(computed(p.grad_loss)), grad_lse_(computed(p.grad_lse)),
        grad_entropy_(computed(p.grad_entropy)), class_weights_(std::move(class_weights)) {
    if (class_weights_.defined())
      total_weight_ = class_weights_.sum(at::kDouble).to(class_weights_.scalar_type());
  }

  /// Returns the parameters of a launch for `tokens` rows from row `begin` on, except for logits, bias and
  /// gradient. The launch writes to `out`.
  kernels::CrossEntropyRows launch(int64_t begin, int64_t tokens, const RowsResult& out) const {
    kernels::CrossEntropyRows rows{};
    static_cast<kernels::CrossEntropyFormula&>(rows) = p_.formula();
    rows.tokens = tokens;
    rows.vocab = p_.classes.expect_int();
    rows.target = static_cast<const int64_t*>(element_of(target_, begin));
    rows.target2 = static_cast<const int64_t*>(element_of(target2_, begin));
    rows.mix = factor_from(mix_, begin, rows.mix_stride);
    rows.ignore_index = p_.options.ignore_index();
    rows.class_weights = pointer_to(class_weights_);
    rows.total_weight = pointer_to(total_weight_);
    rows.grad_loss = factor_from(grad_loss_, begin, rows.grad_loss_stride);
    rows.grad_lse = factor_from(grad_lse_, begin, rows.grad_lse_stride);
    rows.grad_entropy = factor_from(grad_entropy_, begin, rows.grad_entropy_stride);
    rows.loss = result_from(out.loss, begin);
    rows.lse = result_from(out.lse, begin);
    rows.entropy = result_from(out.entropy, begin);
    rows.argmax = static_cast<int64_t*>(result_from(out.argmax, begin));
    return rows;
  }

 private:
  Tensor computed(const OptionalTensor& t) const {
    return t ? t->to(compute_type(p_.input)).contiguous() : Tensor();
  }
  static void* result_from(const Tensor& t, int64_t begin) {
    return t.defined() ? static_cast<char*>(t.mutable_data_ptr()) + begin * t.element_size() : nullptr;
  }

  const TokenProblem& p_;
  Tensor target_, target2_, mix_, grad_loss_, grad_lse_, grad_entropy_, class_weights_, total_weight_;
};

}  // namespace shoestring::losses
