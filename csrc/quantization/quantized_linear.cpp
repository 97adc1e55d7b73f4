#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <shoestring/quantization/ops.h>

#include "core/call.h"
#include "core/tensors.h"
#include "quantization/base_weight.h"

namespace shoestring::quantization {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kQuantizedLinearOp = "quantized_linear";

void check_float(const char* op, const char* name, const Tensor& t) {
  TORCH_CHECK(is_supported_float(t.scalar_type()), op, ": ", name,
              ": expected fp32, fp64, bf16 or fp16, received ", t.scalar_type());
}

void check_quantized_linear(const Tensor& x, const Tensor& packed, const Tensor& absmax,
                            const OptionalTensor& nested, const OptionalTensor& bias,
                            const c10::SymInt& out_features, c10::string_view quant_type,
                            int64_t block_size) {
  TORCH_CHECK(x.dim() >= 1, kQuantizedLinearOp, ": x: expected shape (..., in_features), received a scalar");
  check_float(kQuantizedLinearOp, "x", x);
  TORCH_CHECK(out_features >= 0, kQuantizedLinearOp, ": out_features: expected 0 or more, received ",
              out_features);
  check_packed(kQuantizedLinearOp, packed, absmax, nested, out_features * x.sym_size(-1), quant_type,
               block_size, x.device());
  if (bias.has_value()) {
    check_float(kQuantizedLinearOp, "bias", *bias);
    TORCH_CHECK(bias->dim() == 1 && bias->sym_size(0) == out_features && bias->device() == x.device(),
                kQuantizedLinearOp, ": bias: expected shape (", out_features, ") on ", x.device(),
                ", received ", bias->sym_sizes(), " on ", bias->device());
  }
}

template <Backend backend>
Tensor run_quantized_linear(const Tensor& x, const Tensor& packed, const Tensor& absmax,
                            const OptionalTensor& nested, const OptionalTensor& bias,
                            c10::SymInt out_features, c10::string_view quant_type, int64_t block_size) {
  check_quantized_linear(x, packed, absmax, nested, bias, out_features, quant_type, block_size);
  const c10::OptionalDeviceGuard guard(x.device());
  const gemm::Products products(backend, x);
  const int64_t columns = x.size(-1), rows = out_features.expect_int();
  auto weight = BaseWeight::quantized(
      PackedReader(backend, kQuantizedLinearOp, packed, absmax, nested, quant_type, block_size), rows,
      columns, x.options().dtype(products.weight));
  Adaptation only_bias;
  if (bias.has_value()) only_bias.bias = bias->to(products.other);
  return apply_weight(weight, as_matrix(x).to(products.weight), only_bias, x.scalar_type(), products)
      .view_symint(with_last(x, out_features));
}

template <Backend backend>
Tensor run_quantized_linear_backward(const Tensor& grad_output, const Tensor& packed, const Tensor& absmax,
                                     const OptionalTensor& nested, c10::SymInt in_features,
                                     c10::string_view quant_type, int64_t block_size) {
  const int64_t rows = grad_output.size(-1), columns = in_features.expect_int();
  check_packed("_quantized_linear_backward", packed, absmax, nested, rows * in_features, quant_type,
               block_size, grad_output.device());
  const c10::OptionalDeviceGuard guard(grad_output.device());
  const gemm::Products products(backend, grad_output);
  auto weight = BaseWeight::quantized(
      PackedReader(backend, kQuantizedLinearOp, packed, absmax, nested, quant_type, block_size), rows,
      columns, grad_output.options().dtype(products.weight));
  const Tensor grad = as_matrix(grad_output);
  return times_weight({{grad, Tensor(), weight}}, grad.size(0), columns, grad.options(),
                      grad_output.scalar_type(), Tensor(), Tensor(), products)
      .view_symint(with_last(grad_output, in_features));
}

Tensor quantized_linear_meta(const Tensor& x, const Tensor& packed, const Tensor& absmax,
                             const OptionalTensor& nested, const OptionalTensor& bias,
                             c10::SymInt out_features, c10::string_view quant_type, int64_t block_size) {
  check_quantized_linear(x, packed, absmax, nested, bias, out_features, quant_type, block_size);
  return at::empty_symint(with_last(x, out_features), x.options());
}

Tensor quantized_linear_backward_meta(const Tensor& grad_output, const Tensor&, const Tensor&,
                                      const OptionalTensor&, c10::SymInt in_features, c10::string_view,
                                      int64_t) {
  return at::empty_symint(with_last(grad_output, in_features), grad_output.options());
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("quantized_linear", run_quantized_linear<Backend::kCpu>);
  m.impl("_quantized_linear_backward", run_quantized_linear_backward<Backend::kCpu>);
}
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("quantized_linear", run_quantized_linear<Backend::kCuda>);
  m.impl("_quantized_linear_backward", run_quantized_linear_backward<Backend::kCuda>);
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("quantized_linear", quantized_linear_meta);
  m.impl("_quantized_linear_backward", quantized_linear_backward_meta);
}

}  // namespace

}  // namespace shoestring::quantization

namespace shoestring {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor quantized_linear(const Tensor& x, const Tensor& packed, const Tensor& absmax, int64_t out_features,
                        const OptionalTensor& bias, const OptionalTensor& nested,
                        const QuantizeOptions& options) {
  static auto op = find<decltype(quantization::quantized_linear_meta)>("shoestring::quantized_linear");
  return op.call(x, packed, absmax, nested, bias, out_features, options.quant_type(), options.block_size());
}

}  // namespace shoestring
