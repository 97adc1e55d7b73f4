#include <torch/library.h>

#include <ATen/Functions.h>
#include <shoestring/layers/ops.h>

#include "core/call.h"
#include "layers/norm.h"

namespace shoestring::layers {
namespace {

using at::Tensor;
using norm::OptionalTensor;

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
  const auto like = [&](bool wanted, const OptionalTensor& t) {
    return wanted ? at::empty_symint(t->sym_sizes(), t->options()) : at::empty({0}, x.options());
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
