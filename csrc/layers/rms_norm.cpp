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

constexpr const char* kRmsNormOp = "rms_norm";

kernels::Upcast rms_norm_upcast(c10::string_view name) {
  if (name == "llama") return kernels::Upcast::kLlama;
  if (name == "gemma") return kernels::Upcast::kGemma;
  TORCH_CHECK(name == "none", kRmsNormOp, ": upcast: expected 'llama', 'gemma' or 'none', received '", name,
              "'");
  return kernels::Upcast::kNone;
}

void check_rms_norm(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight, double eps,
                    c10::string_view upcast, OptionalType out_dtype) {
  norm::check_x(kRmsNormOp, x, eps);
  norm::check_vector(kRmsNormOp, "weight", x, weight);
  rms_norm_upcast(upcast);
  norm::check_residual(kRmsNormOp, x, residual, out_dtype,
                       ". With out_dtype the dtype of x, the residual may be fp32.");
  norm::check_out_dtype(kRmsNormOp, x, residual, out_dtype);
}

template <Backend backend>
std::tuple<Tensor, Tensor, Tensor> rms_norm_forward(const Tensor& x, const OptionalTensor& residual,
                                                    const OptionalTensor& weight, double eps, double offset,
                                                    c10::string_view upcast, OptionalType out_dtype) {
  check_rms_norm(x, residual, weight, eps, upcast, out_dtype);
  norm::Options options{eps, offset, rms_norm_upcast(upcast)};
  options.out_dtype = out_dtype;
  const auto r = norm::forward(backend, kRmsNormOp, x, residual, weight, std::nullopt, options);
  return {r.y, norm::or_none(r.sum, residual.value_or(x)), r.rstd};
}

template <Backend backend>
std::tuple<Tensor, Tensor, Tensor> rms_norm_backward(const Tensor& grad, const OptionalTensor& grad_sum,
                                                     const Tensor& x, const OptionalTensor& weight,
                                                     const Tensor& rstd, double offset, bool weight_grad,
                                                     bool rounded_x) {
  const auto r = norm::backward(backend, kRmsNormOp, grad, grad_sum, x, weight, Tensor(), rstd, {0, offset},
                                weight_grad, std::nullopt, rounded_x);
  return {r.x, norm::or_none(r.weight, x), norm::or_none(r.rounded_x, grad)};
}

std::tuple<Tensor, Tensor, Tensor> rms_norm_forward_meta(const Tensor& x, const OptionalTensor& residual,
                                                         const OptionalTensor& weight, double eps,
                                                         double offset, c10::string_view upcast,
                                                         OptionalType out_dtype) {
  check_rms_norm(x, residual, weight, eps, upcast, out_dtype);
  const auto rows = x.sym_sizes().slice(0, x.dim() - 1);
  const auto options = residual.value_or(x).options();
  return {at::empty_symint(x.sym_sizes(), out_dtype ? options.dtype(*out_dtype) : options),
          residual.has_value() ? at::empty_symint(x.sym_sizes(), options) : at::empty({0}, options),
          at::empty_symint(rows, options.dtype(norm::statistics_type(residual.value_or(x))))};
}

std::tuple<Tensor, Tensor, Tensor> rms_norm_backward_meta(const Tensor& grad, const OptionalTensor& grad_sum,
                                                          const Tensor& x, const OptionalTensor& weight,
                                                          const Tensor& rstd, double offset, bool weight_grad,
                                                          bool rounded_x) {
  return {
      at::empty_symint(x.sym_sizes(), x.options()),
      weight_grad ? at::empty_symint(weight->sym_sizes(), weight->options()) : at::empty({0}, x.options()),
      rounded_x ? at::empty_symint(x.sym_sizes(), grad.options()) : at::empty({0}, grad.options())};
}

// Implement rms_norm and add_rms_norm if no gradient is needed. They call _rms_norm_forward and drop results
// that only backward needs.
Tensor rms_norm_composite(const Tensor& x, const OptionalTensor& weight, double eps, double offset,
                          c10::string_view upcast, OptionalType out_dtype) {
  return std::get<0>(norm::call_rms_norm_forward(x, std::nullopt, weight, eps, offset, upcast, out_dtype));
}
std::tuple<Tensor, Tensor> add_rms_norm_composite(const Tensor& x, const Tensor& residual,
                                                  const OptionalTensor& weight, double eps, double offset,
                                                  c10::string_view upcast, OptionalType out_dtype) {
  const auto result = norm::call_rms_norm_forward(x, residual, weight, eps, offset, upcast, out_dtype);
  return {std::get<0>(result), std::get<1>(result)};
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("_rms_norm_forward", rms_norm_forward<Backend::kCpu>);
  m.impl("_rms_norm_backward", rms_norm_backward<Backend::kCpu>);
}
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("_rms_norm_forward", rms_norm_forward<Backend::kCuda>);
  m.impl("_rms_norm_backward", rms_norm_backward<Backend::kCuda>);
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("_rms_norm_forward", rms_norm_forward_meta);
  m.impl("_rms_norm_backward", rms_norm_backward_meta);
}
TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  m.impl("rms_norm", rms_norm_composite);
  m.impl("add_rms_norm", add_rms_norm_composite);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> norm::call_rms_norm_forward(const Tensor& x,
                                                               const OptionalTensor& residual,
                                                               const OptionalTensor& weight, double eps,
                                                               double offset, c10::string_view upcast,
                                                               OptionalType out_dtype) {
  static auto op = find<decltype(rms_norm_forward_meta)>("shoestring::_rms_norm_forward");
  return op.call(x, residual, weight, eps, offset, upcast, out_dtype);
}

}  // namespace shoestring::layers

namespace shoestring {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, const RMSNormOptions& options) {
  static auto op = find<decltype(layers::rms_norm_composite)>("shoestring::rms_norm");
  return op.call(x, weight, options.eps(), options.offset(), options.upcast(), options.out_dtype());
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                                        const RMSNormOptions& options) {
  static auto op = find<decltype(layers::add_rms_norm_composite)>("shoestring::add_rms_norm");
  return op.call(x, residual, weight, options.eps(), options.offset(), options.upcast(), options.out_dtype());
}

}  // namespace shoestring
