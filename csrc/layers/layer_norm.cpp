#include <torch/library.h>

#include <ATen/Functions.h>
#include <shoestring/ops.h>

#include "core/call.h"
#include "layers/norm.h"

namespace shoestring {
namespace {

using at::Tensor;
using norm::OptionalTensor;

constexpr const char* kOp = "layer_norm";

norm::Options options_of(double eps) { return {eps, 0, kernels::Casting::kGemma, true}; }

void check(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  norm::check_x(kOp, x, eps);
  norm::check_vector(kOp, "weight", x, weight);
  norm::check_vector(kOp, "bias", x, bias);
}

template <Backend backend>
std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& x, const OptionalTensor& weight,
                                           const OptionalTensor& bias, double eps) {
  check(x, weight, bias, eps);
  const auto r = norm::forward(backend, kOp, x, std::nullopt, weight, bias, options_of(eps));
  return {r.y, r.mean, r.rstd};
}

Tensor or_none(const Tensor& t, const Tensor& like) {
  return t.defined() ? t : at::empty({0}, like.options());
}

template <Backend backend>
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, const Tensor& x, const OptionalTensor& weight,
                                            const OptionalTensor& bias, const Tensor& mean,
                                            const Tensor& rstd, bool weight_grad, bool bias_grad) {
  const auto bias_type = bias_grad ? c10::optional<at::ScalarType>(bias->scalar_type()) : std::nullopt;
  const auto [to_x, to_weight, to_bias] = norm::backward(backend, kOp, grad, std::nullopt, x, weight, mean,
                                                         rstd, options_of(0), weight_grad, bias_type);
  return {to_x, or_none(to_weight, x), or_none(to_bias, x)};
}

std::tuple<Tensor, Tensor, Tensor> forward_meta(const Tensor& x, const OptionalTensor& weight,
                                                const OptionalTensor& bias, double eps) {
  check(x, weight, bias, eps);
  const auto statistic = [&] {
    return at::empty_symint(x.sym_sizes().slice(0, x.dim() - 1), x.options().dtype(norm::statistics_type(x)));
  };
  return {at::empty_symint(x.sym_sizes(), x.options()), statistic(), statistic()};
}

std::tuple<Tensor, Tensor, Tensor> backward_meta(const Tensor& grad, const Tensor& x,
                                                 const OptionalTensor& weight, const OptionalTensor& bias,
                                                 const Tensor& mean, const Tensor& rstd, bool weight_grad,
                                                 bool bias_grad) {
  const auto like = [&](bool wanted, const OptionalTensor& t) {
    return wanted ? at::empty_symint(t->sym_sizes(), t->options()) : at::empty({0}, x.options());
  };
  return {at::empty_symint(x.sym_sizes(), x.options()), like(weight_grad, weight), like(bias_grad, bias)};
}

// What it is called by: the same without what backward needs.
Tensor plain(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  static auto op = find<decltype(forward_meta)>("shoestring::layer_norm_forward");
  return std::get<0>(op.call(x, weight, bias, eps));
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("layer_norm_forward", forward<Backend::kCpu>);
  m.impl("layer_norm_backward", backward<Backend::kCpu>);
}
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("layer_norm_forward", forward<Backend::kCuda>);
  m.impl("layer_norm_backward", backward<Backend::kCuda>);
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("layer_norm_forward", forward_meta);
  m.impl("layer_norm_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) { m.impl(kOp, plain); }

}  // namespace

Tensor layer_norm(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  static auto op = find<decltype(plain)>("shoestring::layer_norm");
  return op.call(x, weight, bias, eps);
}

}  // namespace shoestring
