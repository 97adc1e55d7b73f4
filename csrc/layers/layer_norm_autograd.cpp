#include <tuple>

#include <torch/library.h>

#include "core/arguments.h"
#include "core/autograd.h"
#include "layers/norm.h"

namespace shoestring::layers {
namespace {

using at::Tensor;
using norm::OptionalTensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Autograd of layer_norm and add_layer_norm. Saves the tensor that is normalised (x, or the result x +
// residual), the weight, the bias if its gradient is wanted, and mean and rstd of each row.
class LayerNorm : public torch::autograd::Function<LayerNorm> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& residual,
                               const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                               c10::optional<at::ScalarType> out_dtype) {
    at::AutoDispatchBelowADInplaceOrView below;
    const auto [y, sum, mean, rstd] =
        norm::call_layer_norm_forward(x, residual, weight, bias, eps, out_dtype);
    ctx->set_materialize_grads(false);
    const bool rounded = residual.has_value() && x.scalar_type() != residual->scalar_type() &&
                         y.scalar_type() == x.scalar_type();
    save_fields(ctx, Saved{residual.has_value() ? sum : x, weight, wants_grad(bias) ? bias : OptionalTensor(),
                           mean, rstd, wants_grad(weight), rounded, x.scalar_type()});
    if (!residual.has_value()) return {y};
    return {y, sum};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    const auto saved = saved_fields<Saved>(ctx);
    Tensor grad_sum = upstream.size() > 1 ? upstream[1] : Tensor(), grad_x, grad_weight, grad_bias;
    if (upstream[0].defined()) {
      at::AutoDispatchBelowADInplaceOrView below;
      static auto op = find<std::tuple<Tensor, Tensor, Tensor, Tensor>(
          const Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
          const Tensor&, const Tensor&, bool, bool, bool)>("shoestring::_layer_norm_backward");
      std::tie(grad_sum, grad_weight, grad_bias, grad_x) =
          op.call(upstream[0], as_optional(grad_sum), saved.normalised, saved.weight, saved.bias, saved.mean,
                  saved.rstd, saved.weight_grad, saved.bias.has_value(), saved.rounded);
      if (!saved.rounded) grad_x = Tensor();
      if (!saved.weight_grad) grad_weight = Tensor();
      if (!saved.bias) grad_bias = Tensor();
    }
    // x may be narrower than the residual and the sum
    if (!grad_x.defined() && grad_sum.defined()) grad_x = grad_sum.to(saved.dtype);
    if (upstream.size() == 1) grad_sum = Tensor();  // there is no residual
    variable_list gradients = once_differentiable("layer_norm", {grad_x, grad_sum, grad_weight, grad_bias});
    gradients.resize(6);  // no gradients for eps and out_dtype
    return gradients;
  }

 private:
  struct Saved {
    Tensor normalised;
    OptionalTensor weight, bias;  // the bias is saved only if its gradient is wanted
    Tensor mean, rstd;
    bool weight_grad = false;
    // Whether backward also rounds the gradient of x + residual, which then is the gradient of x.
    bool rounded = false;
    at::ScalarType dtype = at::kFloat;

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      visit.each(self.normalised, self.weight, self.bias, self.mean, self.rstd, self.weight_grad,
                 self.rounded, self.dtype);
    }
  };
};

Tensor layer_norm_autograd(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                           double eps, c10::optional<at::ScalarType> out_dtype) {
  if (needs_grad(x, weight.value_or(Tensor()), bias.value_or(Tensor())))
    return LayerNorm::apply(x, OptionalTensor(), weight, bias, eps, out_dtype)[0];
  at::AutoDispatchBelowADInplaceOrView below;
  static auto op = find<decltype(layer_norm_autograd)>("shoestring::layer_norm");
  return op.call(x, weight, bias, eps, out_dtype);
}

std::tuple<Tensor, Tensor> add_layer_norm_autograd(const Tensor& x, const Tensor& residual,
                                                   const OptionalTensor& weight, const OptionalTensor& bias,
                                                   double eps, c10::optional<at::ScalarType> out_dtype) {
  if (needs_grad(x, residual, weight.value_or(Tensor()), bias.value_or(Tensor()))) {
    const variable_list results = LayerNorm::apply(x, OptionalTensor(residual), weight, bias, eps, out_dtype);
    return {results[0], results[1]};
  }
  at::AutoDispatchBelowADInplaceOrView below;
  static auto op = find<decltype(add_layer_norm_autograd)>("shoestring::add_layer_norm");
  return op.call(x, residual, weight, bias, eps, out_dtype);
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) {
  m.impl("layer_norm", layer_norm_autograd);
  m.impl("add_layer_norm", add_layer_norm_autograd);
}

}  // namespace
}  // namespace shoestring::layers
