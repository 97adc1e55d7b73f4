#include <tuple>

#include <ATen/Functions.h>
#include <torch/library.h>

#include <shoestring/layers/ops.h>

#include "core/arguments.h"
#include "core/autograd.h"
#include "core/call.h"
#include "layers/norm.h"

namespace shoestring::layers {
namespace {

using at::Tensor;
using norm::OptionalTensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using OptionalType = c10::optional<at::ScalarType>;

constexpr const char* kLayerNormOp = "layer_norm";

norm::Options layer_norm_options(double eps, OptionalType out_dtype) {
  return {eps, 0, kernels::Upcast::kGemma, true, out_dtype};
}

using LayerNormResults = std::tuple<Tensor, Tensor, Tensor, Tensor>;

void check_layer_norm(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                      const OptionalTensor& bias, double eps, OptionalType out_dtype) {
  norm::check_x(kLayerNormOp, x, eps);
  norm::check_vector(kLayerNormOp, "weight", x, weight);
  norm::check_vector(kLayerNormOp, "bias", x, bias);
  // The result has the dtype of x or of the residual if x is narrower than the residual.
  const bool widens = !out_dtype.has_value() || *out_dtype == at::kFloat;
  norm::check_residual(
      kLayerNormOp, x, residual, widens ? x.scalar_type() : out_dtype,
      ". The residual may be fp32 if x is 16-bit, without out_dtype or with the dtype of x.");
  norm::check_out_dtype(kLayerNormOp, x, residual, out_dtype);
}

template <Backend backend>
LayerNormResults layer_norm_forward(const Tensor& x, const OptionalTensor& residual,
                                    const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                    OptionalType out_dtype) {
  check_layer_norm(x, residual, weight, bias, eps, out_dtype);
  const auto r =
      norm::forward(backend, kLayerNormOp, x, residual, weight, bias, layer_norm_options(eps, out_dtype));
  return {r.y, norm::or_none(r.sum, residual.value_or(x)), r.mean, r.rstd};
}

template <Backend backend>
LayerNormResults layer_norm_backward(const Tensor& grad, const OptionalTensor& grad_sum, const Tensor& x,
                                     const OptionalTensor& weight, const OptionalTensor& bias,
                                     const Tensor& mean, const Tensor& rstd, bool weight_grad, bool bias_grad,
                                     bool rounded_x) {
  const auto bias_type = bias_grad ? c10::optional<at::ScalarType>(bias->scalar_type()) : std::nullopt;
  const auto r = norm::backward(backend, kLayerNormOp, grad, grad_sum, x, weight, mean, rstd,
                                layer_norm_options(0, std::nullopt), weight_grad, bias_type, rounded_x);
  return {r.x, norm::or_none(r.weight, x), norm::or_none(r.bias, x), norm::or_none(r.rounded_x, grad)};
}

LayerNormResults layer_norm_forward_meta(const Tensor& x, const OptionalTensor& residual,
                                         const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                         OptionalType out_dtype) {
  check_layer_norm(x, residual, weight, bias, eps, out_dtype);
  const auto statistic = [&] {
    return at::empty_symint(x.sym_sizes().slice(0, x.dim() - 1), x.options().dtype(norm::statistics_type(x)));
  };
  const auto options = residual.has_value() ? residual->options() : x.options();
  return {at::empty_symint(x.sym_sizes(), out_dtype ? options.dtype(*out_dtype) : options),
          residual.has_value() ? at::empty_symint(x.sym_sizes(), options) : at::empty({0}, options),
          statistic(), statistic()};
}

LayerNormResults layer_norm_backward_meta(const Tensor& grad, const OptionalTensor& grad_sum, const Tensor& x,
                                          const OptionalTensor& weight, const OptionalTensor& bias,
                                          const Tensor& mean, const Tensor& rstd, bool weight_grad,
                                          bool bias_grad, bool rounded_x) {
  const auto like = [&](bool is_requested, const OptionalTensor& t) {
    return is_requested ? at::empty_symint(t->sym_sizes(), t->options()) : at::empty({0}, x.options());
  };
  return {at::empty_symint(x.sym_sizes(), x.options()), like(weight_grad, weight), like(bias_grad, bias),
          rounded_x ? at::empty_symint(x.sym_sizes(), grad.options()) : at::empty({0}, grad.options())};
}

// Implement layer_norm and add_layer_norm if no gradient is needed. They call _layer_norm_forward and drop
// results that only backward needs.
Tensor layer_norm_composite(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                            double eps, OptionalType out_dtype) {
  return std::get<0>(norm::call_layer_norm_forward(x, std::nullopt, weight, bias, eps, out_dtype));
}
std::tuple<Tensor, Tensor> add_layer_norm_composite(const Tensor& x, const Tensor& residual,
                                                    const OptionalTensor& weight, const OptionalTensor& bias,
                                                    double eps, OptionalType out_dtype) {
  const auto result = norm::call_layer_norm_forward(x, residual, weight, bias, eps, out_dtype);
  return {std::get<0>(result), std::get<1>(result)};
}

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

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // layer_norm returns y = (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension.
  // add_layer_norm normalises x + residual and also returns this sum, both in the dtype of the residual,
  // which may be fp32 while x is 16-bit. out_dtype: as for rms_norm.
  m.def(R"(layer_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, *, float eps,
      ScalarType? out_dtype=None) -> Tensor)");
  m.def(R"(add_layer_norm(Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None, *,
      float eps, ScalarType? out_dtype=None) -> (Tensor y, Tensor sum))");
  // _layer_norm_forward and _layer_norm_backward compute layer_norm and add_layer_norm and their gradients.
  // As in RMSNorm, sum is empty if there is no residual, grad_sum is the upstream gradient of sum, and
  // rounded_grad_x is grad_x in the dtype of grad_y if rounded_x is true.
  m.def(R"(_layer_norm_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias,
      float eps, ScalarType? out_dtype=None) -> (Tensor y, Tensor sum, Tensor mean, Tensor rstd))");
  m.def(R"(_layer_norm_backward(Tensor grad_y, Tensor? grad_sum, Tensor x, Tensor? weight, Tensor? bias,
      Tensor mean, Tensor rstd, bool weight_grad, bool bias_grad, bool rounded_x=False) -> (Tensor grad_x,
      Tensor grad_weight, Tensor grad_bias, Tensor rounded_grad_x))");
}
TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("_layer_norm_forward", layer_norm_forward<Backend::kCpu>);
  m.impl("_layer_norm_backward", layer_norm_backward<Backend::kCpu>);
}
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("_layer_norm_forward", layer_norm_forward<Backend::kCuda>);
  m.impl("_layer_norm_backward", layer_norm_backward<Backend::kCuda>);
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("_layer_norm_forward", layer_norm_forward_meta);
  m.impl("_layer_norm_backward", layer_norm_backward_meta);
}
TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  m.impl("layer_norm", layer_norm_composite);
  m.impl("add_layer_norm", add_layer_norm_composite);
}
TORCH_LIBRARY_IMPL(shoestring, Autograd, m) {
  m.impl("layer_norm", layer_norm_autograd);
  m.impl("add_layer_norm", add_layer_norm_autograd);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> norm::call_layer_norm_forward(const Tensor& x,
                                                                         const OptionalTensor& residual,
                                                                         const OptionalTensor& weight,
                                                                         const OptionalTensor& bias,
                                                                         double eps, OptionalType out_dtype) {
  static auto op = find<decltype(layer_norm_forward_meta)>("shoestring::_layer_norm_forward");
  return op.call(x, residual, weight, bias, eps, out_dtype);
}

}  // namespace shoestring::layers

namespace shoestring {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor layer_norm(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                  std::optional<at::ScalarType> out_dtype) {
  static auto op = find<decltype(layers::layer_norm_composite)>("shoestring::layer_norm");
  return op.call(x, weight, bias, eps, out_dtype);
}

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual,
                                          const OptionalTensor& weight, const OptionalTensor& bias,
                                          double eps, std::optional<at::ScalarType> out_dtype) {
  static auto op = find<decltype(layers::add_layer_norm_composite)>("shoestring::add_layer_norm");
  return op.call(x, residual, weight, bias, eps, out_dtype);
}

}  // namespace shoestring
