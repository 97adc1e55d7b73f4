#include <tuple>

#include <torch/library.h>

#include "core/autograd.h"

namespace shoestring::layers {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;

class LayerNorm : public torch::autograd::Function<LayerNorm> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps) {
    at::AutoDispatchBelowADInplaceOrView below;
    static auto op =
        find<std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                                double)>("shoestring::_layer_norm_forward");
    const auto [y, mean, rstd] = op.call(x, weight, bias, eps);
    ctx->save_for_backward({x, weight.value_or(Tensor()), wants_grad(bias) ? *bias : Tensor(), mean, rstd});
    ctx->saved_data["weight_grad"] = wants_grad(weight);
    return y;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    const variable_list saved = ctx->get_saved_variables();
    const bool weight_grad = ctx->saved_data["weight_grad"].toBool(), bias_grad = saved[2].defined();
    Tensor to_x, to_weight, to_bias;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      static auto op = find<std::tuple<Tensor, Tensor, Tensor>(
          const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, const Tensor&,
          const Tensor&, bool, bool)>("shoestring::_layer_norm_backward");
      std::tie(to_x, to_weight, to_bias) =
          op.call(upstream[0], saved[0], as_optional(saved[1]), as_optional(saved[2]), saved[3], saved[4],
                  weight_grad, bias_grad);
    }
    variable_list gradients = once_differentiable(
        "layer_norm", {to_x, weight_grad ? to_weight : Tensor(), bias_grad ? to_bias : Tensor()});
    gradients.emplace_back();  // no gradient for eps
    return gradients;
  }
};

Tensor layer_norm_autograd(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                           double eps) {
  if (needs_grad(x, weight.value_or(Tensor()), bias.value_or(Tensor())))
    return LayerNorm::apply(x, weight, bias, eps);
  at::AutoDispatchBelowADInplaceOrView below;
  static auto op = find<decltype(layer_norm_autograd)>("shoestring::layer_norm");
  return op.call(x, weight, bias, eps);
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl("layer_norm", layer_norm_autograd); }

}  // namespace
}  // namespace shoestring::layers
