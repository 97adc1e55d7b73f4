#include "ops/linear_cross_entropy.h"

#include <cmath>

#include <ATen/Functions.h>
#include <torch/library.h>

#include <shoestring/ops.h>

#include "ops/base_weight.h"
#include "ops/call.h"

namespace shoestring {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

namespace cross_entropy {

void check(const Tensor& hidden, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
           c10::string_view reduction, double label_smoothing, double softcap, int64_t workspace_mb) {
  TORCH_CHECK(hidden.dim() >= 1, kOp, ": hidden: expected shape (..., features), received a scalar");
  TORCH_CHECK(weight.dim() == 2 && weight.sym_size(1) == hidden.sym_size(-1), kOp, ": weight: expected shape (vocab, ",
              hidden.sym_size(-1), "), features as in hidden, received ", weight.sym_sizes());
  TORCH_CHECK(target.sym_sizes() == hidden.sym_sizes().slice(0, hidden.dim() - 1), kOp,
              ": target: expected hidden's shape without its last dimension, ",
              hidden.sym_sizes().slice(0, hidden.dim() - 1), ", received ", target.sym_sizes());
  TORCH_CHECK(target.scalar_type() == at::kLong, kOp, ": target: expected int64, received ", target.scalar_type(),
              "; call target.long()");
  TORCH_CHECK(at::isFloatingType(hidden.scalar_type()), kOp, ": hidden: expected fp32, fp64, bf16 or fp16, received ",
              hidden.scalar_type());
  TORCH_CHECK(weight.scalar_type() == hidden.scalar_type(), kOp, ": weight: expected hidden's dtype, ",
              hidden.scalar_type(), ", received ", weight.scalar_type());
  TORCH_CHECK(weight.device() == hidden.device() && target.device() == hidden.device(), kOp,
              ": weight and target: expected hidden's device, ", hidden.device(), ", received ", weight.device(), " and ",
              target.device());
  if (bias.has_value()) {
    TORCH_CHECK(bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), kOp, ": bias: expected shape (",
                weight.sym_size(0), "), received ", bias->sym_sizes());
    TORCH_CHECK(bias->scalar_type() == hidden.scalar_type() && bias->device() == hidden.device(), kOp,
                ": bias: expected hidden's dtype and device, ", hidden.scalar_type(), " on ", hidden.device(),
                ", received ", bias->scalar_type(), " on ", bias->device());
  }
  TORCH_CHECK(reduction == "mean" || reduction == "sum" || reduction == "none", kOp,
              ": reduction: expected 'mean', 'sum' or 'none', received '", reduction, "'");
  TORCH_CHECK(label_smoothing >= 0 && label_smoothing < 1, kOp, ": label_smoothing: expected a number in [0, 1), received ",
              label_smoothing);
  TORCH_CHECK(softcap >= 0 && std::isfinite(softcap), kOp, ": softcap: expected 0 (none) or a positive number, received ",
              softcap);
  TORCH_CHECK(workspace_mb >= 0, kOp, ": workspace_mb: expected MiB, or 0 for the device's default, received ",
              workspace_mb);
}

std::tuple<Tensor, Tensor, Tensor> gradients(const Result& result, const Tensor& hidden) {
  const auto or_empty = [&](const Tensor& t) { return t.defined() ? t : at::empty({0}, hidden.options()); };
  return {result.grad_hidden.defined() ? result.grad_hidden.view(hidden.sizes()) : or_empty(result.grad_hidden),
          or_empty(result.grad_weight), or_empty(result.grad_bias)};
}

}  // namespace cross_entropy

namespace {

using cross_entropy::Mask;

std::tuple<Tensor, Tensor, Tensor> empty_gradients(const Tensor& hidden, const Tensor& weight, Mask mask) {
  const auto none = [&] { return at::empty({0}, hidden.options()); };
  return {mask[0] ? at::empty_like(hidden, at::MemoryFormat::Contiguous) : none(),
          mask[1] ? at::empty_like(weight, at::MemoryFormat::Contiguous) : none(),
          mask[2] ? at::empty_symint({weight.sym_size(0)}, weight.options()) : none()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> forward_meta(const Tensor& hidden, const Tensor& weight,
                                                        const Tensor& target, const OptionalTensor& bias,
                                                        int64_t ignore_index, c10::string_view reduction,
                                                        double label_smoothing, double softcap, int64_t workspace_mb,
                                                        Mask mask) {
  cross_entropy::check(hidden, weight, target, bias, reduction, label_smoothing, softcap, workspace_mb);
  auto [grad_hidden, grad_weight, grad_bias] = empty_gradients(hidden, weight, mask);
  const auto options = hidden.options().dtype(compute_type(hidden));
  Tensor loss =
      reduction == "none" ? at::empty_symint(target.sym_sizes(), options) : at::empty_symint({}, options);
  return {loss, grad_hidden, grad_weight, grad_bias};
}

std::tuple<Tensor, Tensor, Tensor> backward_meta(const Tensor&, const Tensor& hidden, const Tensor& weight,
                                                 const Tensor&, const OptionalTensor&, int64_t, c10::string_view, double,
                                                 double, int64_t, Mask mask) {
  return empty_gradients(hidden, weight, mask);
}

// Without gradients the operator is its forward part, on every device.
Tensor loss_only(const Tensor& hidden, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
                 int64_t ignore_index, c10::string_view reduction, double label_smoothing, double softcap,
                 int64_t workspace_mb) {
  static auto op = find<decltype(forward_meta)>("shoestring::linear_cross_entropy_forward");
  return std::get<0>(op.call(hidden, weight, target, bias, ignore_index, reduction, label_smoothing, softcap,
                             workspace_mb, Mask{false, false, false}));
}

TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("linear_cross_entropy_forward", forward_meta);
  m.impl("linear_cross_entropy_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) { m.impl("linear_cross_entropy", loss_only); }

}  // namespace

Tensor linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& target,
                            const OptionalTensor& bias, const LinearCrossEntropyOptions& options) {
  static auto op = find<decltype(loss_only)>("shoestring::linear_cross_entropy");
  return op.call(hidden, weight, target, bias, options.ignore_index(), options.reduction(), options.label_smoothing(),
                 options.softcap(), options.workspace_mb());
}

}  // namespace shoestring
