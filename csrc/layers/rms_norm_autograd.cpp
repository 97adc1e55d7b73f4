#include <tuple>

#include <torch/library.h>

#include "core/autograd.h"
#include "layers/norm.h"

namespace shoestring::layers {
namespace {

using at::Tensor;
using norm::OptionalTensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Autograd of rms_norm and add_rms_norm. Saves the tensor that is normalised (x, or the result x + residual),
// the weight and rstd of each row.
class RmsNorm : public torch::autograd::Function<RmsNorm> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& residual,
                               const OptionalTensor& weight, double eps, double offset,
                               c10::string_view upcast, c10::optional<at::ScalarType> out_dtype) {
    at::AutoDispatchBelowADInplaceOrView below;
    const auto [y, sum, rstd] =
        norm::call_rms_norm_forward(x, residual, weight, eps, offset, upcast, out_dtype);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({residual.has_value() ? sum : x, weight.value_or(Tensor()), rstd});
    ctx->saved_data["offset"] = offset;
    ctx->saved_data["narrow"] = residual.has_value() && x.scalar_type() != residual->scalar_type();
    ctx->saved_data["dtype"] = x.scalar_type();
    ctx->saved_data["weight_grad"] = wants_grad(weight);
    if (!residual.has_value()) return {y};
    return {y, sum};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    const variable_list saved = ctx->get_saved_variables();
    const bool narrow = ctx->saved_data["narrow"].toBool();
    Tensor grad_sum = upstream.size() > 1 ? upstream[1] : Tensor(), grad_x, grad_weight;
    if (upstream[0].defined()) {
      const bool weight_grad = ctx->saved_data["weight_grad"].toBool();
      at::AutoDispatchBelowADInplaceOrView below;
      static auto op =
          find<std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const OptionalTensor&, const Tensor&,
                                                  const OptionalTensor&, const Tensor&, double, bool, bool)>(
              "shoestring::_rms_norm_backward");
      std::tie(grad_sum, grad_weight, grad_x) =
          op.call(upstream[0], as_optional(grad_sum), saved[0], as_optional(saved[1]), saved[2],
                  ctx->saved_data["offset"].toDouble(), weight_grad, narrow);
      if (!weight_grad) grad_weight = Tensor();
    } else if (narrow && grad_sum.defined()) {
      grad_x = grad_sum.to(ctx->saved_data["dtype"].toScalarType());
    }
    if (!narrow) grad_x = grad_sum;
    variable_list g = once_differentiable("rms_norm", {grad_x, grad_sum, grad_weight});
    return {narrow ? g[0] : g[1], upstream.size() > 1 ? g[1] : Tensor(), g[2], {}, {}, {}, {}};
  }
};

Tensor rms_norm_autograd(const Tensor& x, const OptionalTensor& weight, double eps, double offset,
                         c10::string_view upcast, c10::optional<at::ScalarType> out_dtype) {
  if (needs_grad(x, weight.value_or(Tensor())))
    return RmsNorm::apply(x, OptionalTensor(), weight, eps, offset, upcast, out_dtype)[0];
  at::AutoDispatchBelowADInplaceOrView below;
  static auto op = find<decltype(rms_norm_autograd)>("shoestring::rms_norm");
  return op.call(x, weight, eps, offset, upcast, out_dtype);
}

std::tuple<Tensor, Tensor> add_rms_norm_autograd(const Tensor& x, const Tensor& residual,
                                                 const OptionalTensor& weight, double eps, double offset,
                                                 c10::string_view upcast,
                                                 c10::optional<at::ScalarType> out_dtype) {
  if (needs_grad(x, residual, weight.value_or(Tensor()))) {
    const variable_list results =
        RmsNorm::apply(x, OptionalTensor(residual), weight, eps, offset, upcast, out_dtype);
    return {results[0], results[1]};
  }
  at::AutoDispatchBelowADInplaceOrView below;
  static auto op = find<decltype(add_rms_norm_autograd)>("shoestring::add_rms_norm");
  return op.call(x, residual, weight, eps, offset, upcast, out_dtype);
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) {
  m.impl("rms_norm", rms_norm_autograd);
  m.impl("add_rms_norm", add_rms_norm_autograd);
}

}  // namespace
}  // namespace shoestring::layers
