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
                               c10::string_view upcast) {
    at::AutoDispatchBelowADInplaceOrView below;
    const auto [y, sum, rstd] = norm::call_rms_norm_forward(x, residual, weight, eps, offset, upcast);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({residual.has_value() ? sum : x, weight.value_or(Tensor()), rstd});
    ctx->saved_data["offset"] = offset;
    ctx->saved_data["weight_grad"] = wants_grad(weight);
    if (!residual.has_value()) return {y};
    return {y, sum};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    const variable_list saved = ctx->get_saved_variables();
    Tensor grad_x = upstream.size() > 1 ? upstream[1] : Tensor(), grad_weight;
    if (upstream[0].defined()) {
      const bool weight_grad = ctx->saved_data["weight_grad"].toBool();
      at::AutoDispatchBelowADInplaceOrView below;
      static auto op = find<std::tuple<Tensor, Tensor>(const Tensor&, const OptionalTensor&, const Tensor&,
                                                       const OptionalTensor&, const Tensor&, double, bool)>(
          "shoestring::_rms_norm_backward");
      std::tie(grad_x, grad_weight) =
          op.call(upstream[0], as_optional(grad_x), saved[0], as_optional(saved[1]), saved[2],
                  ctx->saved_data["offset"].toDouble(), weight_grad);
      if (!weight_grad) grad_weight = Tensor();
    }
    variable_list gradients = once_differentiable("rms_norm", {grad_x, grad_weight});
    return {gradients[0], upstream.size() > 1 ? gradients[0] : Tensor(), gradients[1], {}, {}, {}};
  }
};

Tensor rms_norm_autograd(const Tensor& x, const OptionalTensor& weight, double eps, double offset,
                         c10::string_view upcast) {
  if (needs_grad(x, weight.value_or(Tensor())))
    return RmsNorm::apply(x, OptionalTensor(), weight, eps, offset, upcast)[0];
  at::AutoDispatchBelowADInplaceOrView below;
  static auto op = find<decltype(rms_norm_autograd)>("shoestring::rms_norm");
  return op.call(x, weight, eps, offset, upcast);
}

std::tuple<Tensor, Tensor> add_rms_norm_autograd(const Tensor& x, const Tensor& residual,
                                                 const OptionalTensor& weight, double eps, double offset,
                                                 c10::string_view upcast) {
  if (needs_grad(x, residual, weight.value_or(Tensor()))) {
    const variable_list results = RmsNorm::apply(x, OptionalTensor(residual), weight, eps, offset, upcast);
    return {results[0], results[1]};
  }
  at::AutoDispatchBelowADInplaceOrView below;
  static auto op = find<decltype(add_rms_norm_autograd)>("shoestring::add_rms_norm");
  return op.call(x, residual, weight, eps, offset, upcast);
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) {
  m.impl("rms_norm", rms_norm_autograd);
  m.impl("add_rms_norm", add_rms_norm_autograd);
}

}  // namespace
}  // namespace shoestring::layers
