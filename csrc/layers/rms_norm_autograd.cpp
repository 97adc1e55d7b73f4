#include <tuple>

#include <torch/library.h>

#include "core/autograd.h"

namespace shoestring {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;

OptionalTensor optional(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

auto call(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight, double eps,
          double offset, c10::string_view casting) {
  static auto op = find<std::tuple<Tensor, Tensor, Tensor>(
      const Tensor&, const OptionalTensor&, const OptionalTensor&, double, double, c10::string_view)>(
      "shoestring::rms_norm_forward");
  return op.call(x, residual, weight, eps, offset, casting);
}

// What was normalised is kept, which with a residual is the second result, and one number a row.
class RmsNorm : public torch::autograd::Function<RmsNorm> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& residual,
                               const OptionalTensor& weight, double eps, double offset,
                               c10::string_view casting) {
    at::AutoDispatchBelowADInplaceOrView below;
    const auto [y, sum, rstd] = call(x, residual, weight, eps, offset, casting);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({residual.has_value() ? sum : x, weight.value_or(Tensor()), rstd});
    ctx->saved_data["offset"] = offset;
    ctx->saved_data["weight_grad"] = weight.has_value() && weight->requires_grad();
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
          "shoestring::rms_norm_backward");
      std::tie(grad_x, grad_weight) = op.call(upstream[0], optional(grad_x), saved[0], optional(saved[1]),
                                              saved[2], ctx->saved_data["offset"].toDouble(), weight_grad);
      if (!weight_grad) grad_weight = Tensor();
    }
    variable_list gradients = once_differentiable("rms_norm", {grad_x, grad_weight});
    return {gradients[0], upstream.size() > 1 ? gradients[0] : Tensor(), gradients[1], {}, {}, {}};
  }
};

Tensor plain(const Tensor& x, const OptionalTensor& weight, double eps, double offset,
             c10::string_view casting) {
  if (needs_grad(x, weight.value_or(Tensor())))
    return RmsNorm::apply(x, OptionalTensor(), weight, eps, offset, casting)[0];
  at::AutoDispatchBelowADInplaceOrView below;
  static auto op = find<decltype(plain)>("shoestring::rms_norm");
  return op.call(x, weight, eps, offset, casting);
}

std::tuple<Tensor, Tensor> with_residual(const Tensor& x, const Tensor& residual,
                                         const OptionalTensor& weight, double eps, double offset,
                                         c10::string_view casting) {
  if (needs_grad(x, residual, weight.value_or(Tensor()))) {
    const variable_list results = RmsNorm::apply(x, OptionalTensor(residual), weight, eps, offset, casting);
    return {results[0], results[1]};
  }
  at::AutoDispatchBelowADInplaceOrView below;
  static auto op = find<decltype(with_residual)>("shoestring::add_rms_norm");
  return op.call(x, residual, weight, eps, offset, casting);
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) {
  m.impl("rms_norm", plain);
  m.impl("add_rms_norm", with_residual);
}

}  // namespace
}  // namespace shoestring
