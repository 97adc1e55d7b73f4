// Linear layers with trainable weights, one at a time or several that read the same input.

#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <shoestring/gemm/ops.h>

#include "core/call.h"
#include "core/tensors.h"
#include "gemm/gemm.h"
#include "gemm/linear.h"
#include "gemm/packed_gemm.h"
#include "gemm/products.h"

namespace shoestring::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalType = std::optional<at::ScalarType>;

// With fewer rows, fewer columns or a smaller depth, a product is computed without packing.
constexpr int64_t kLeastToAdd = 8;

void check_linear(const char* op, const Tensor& x, at::TensorList weights, const OptionalTensors& biases,
                  OptionalType dtype, int64_t library) {
  const auto type = dtype.value_or(x.scalar_type());
  TORCH_CHECK(x.dim() >= 1, op, ": x: expected shape (..., in_features), received a scalar");
  TORCH_CHECK(is_supported_float(type), op, ": ", dtype.has_value() ? "dtype" : "x",
              ": expected fp32, fp64, bf16 or fp16, received ", type);
  TORCH_CHECK(biases.empty() || biases.size() == weights.size(), op, ": biases: expected none or ",
              weights.size(), ", one for each weight, received ", biases.size());
  TORCH_CHECK(library >= 0 && library <= (kLinearForward | kLinearGradX | kLinearGradWeight), op,
              ": library: expected a sum of 1, 2 and 4, received ", library);
  const auto fits = [&](const char* name, const Tensor& t) {
    TORCH_CHECK(dtype.has_value() ? is_supported_float(t.scalar_type()) : t.scalar_type() == type, op, ": ",
                name, ": expected ", dtype.has_value() ? "fp32, fp64, bf16 or fp16" : c10::toString(type),
                ", received ", t.scalar_type(),
                dtype.has_value() ? "" : "; pass dtype to multiply tensors of several dtypes");
    TORCH_CHECK(t.device() == x.device(), op, ": ", name, ": expected a tensor on ", x.device(),
                ", received one on ", t.device());
  };
  fits("x", x);
  for (size_t i = 0; i < weights.size(); ++i) {
    const Tensor& weight = weights[i];
    TORCH_CHECK(weight.dim() == 2 && weight.sym_size(1) == x.sym_size(-1), op,
                ": weight: expected shape (out_features, ", x.sym_size(-1), "), received ",
                weight.sym_sizes());
    fits("weight", weight);
    if (biases.empty() || !biases.get(i).has_value()) continue;
    const Tensor bias = *biases.get(i);
    TORCH_CHECK(bias.dim() == 1 && bias.sym_size(0) == weight.sym_size(0), op, ": bias: expected shape (",
                weight.sym_size(0), "), received ", bias.sym_sizes());
    fits("bias", bias);
  }
}

void check_residual(const Tensor& residual, const std::vector<c10::SymInt>& shape, const Tensor& x) {
  TORCH_CHECK(residual.sym_sizes() == shape && residual.device() == x.device() &&
                  is_supported_float(residual.scalar_type()),
              kLinearOp, ": residual: expected the shape of the result, ", c10::SymIntArrayRef(shape),
              ", in fp32, fp64, bf16 or fp16 on ", x.device(), ", received ", residual.sym_sizes(), " ",
              residual.scalar_type(), " on ", residual.device());
}

// Computes out = beta * out + a b on the CPU by PyTorch's BLAS library.
void gemm_library(const Tensor& out, const Tensor& a, const Tensor& b, double beta) {
  Tensor c = out;
  if (out.scalar_type() == a.scalar_type()) {
    at::addmm_out(c, c, a, b, beta);
    return;
  }
  // A 16-bit product that is added to an fp32 `out` is computed some rows at a time, so that it is still in
  // the cache when it is added.
  constexpr int64_t kCached = int64_t{1} << 21;
  const int64_t step = std::max<int64_t>(64, kCached / std::max<int64_t>(1, b.size(1)));
  for (int64_t i = 0; i < a.size(0); i += step) {
    const int64_t rows = std::min(step, a.size(0) - i);
    const Tensor product = at::mm(a.narrow(0, i, rows), b);
    Tensor part = c.narrow(0, i, rows);
    beta == 0 ? part.copy_(product) : part.mul_(beta).add_(product);
  }
}

// Computes out = beta * out + a b. The operands are rounded to `type` first. out has any dtype; the product
// is rounded to it once, except that the library's product of bf16 matrices is rounded to bf16.
void multiply_into(Backend backend, bool library, at::ScalarType type, const Tensor& out, const Tensor& a,
                   const Tensor& b, double beta) {
  const auto out_type = out.scalar_type();
  if (out_type != type && !(out_type == at::kFloat && c10::elementSize(type) == 2)) {
    Tensor wide = beta == 0 ? at::empty(out.sizes(), out.options().dtype(type)) : out.to(type);
    multiply_into(backend, library, type, wide, a, b, beta);
    Tensor(out).copy_(wide);
  } else if (backend == Backend::kCuda) {
    gemm(out, a.to(type), b.to(type), beta);
  } else if (library) {
    gemm_library(out, a.to(type), b.to(type), beta);
  } else if (type == at::kBFloat16) {
    gemm_in(type, out, a, b, beta);  // rounds its operands itself
  } else {
    gemm_cpu(out, a.to(type), b.to(type), beta, 1);
  }
}

// Returns whether our product x W^T with a 16-bit result adds the bias before it rounds the result.
bool adds_bias(const Tensor& x, const Tensor& weight) {
  return x.element_size() == 2 && sums_products(product_type(x)) &&
         std::min({x.size(0), x.size(1), weight.size(0)}) >= kLeastToAdd;
}

// Computes x W^T + bias, or x W^T + bias + residual, for x (tokens, in_features).
Tensor multiply_linear(Backend backend, int64_t library, at::ScalarType type, const Tensor& x,
                       const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& residual) {
  const bool is_own_kernel = backend == Backend::kCpu && (library & kLinearForward) == 0;
  if (is_own_kernel && bias.has_value() && !residual.has_value() && adds_bias(x, weight)) {
    const Tensor result = at::empty({x.size(0), weight.size(0)}, x.options());
    gemm_sum(product_type(x), result, {{x, weight.t()}}, {}, bias->to(at::kFloat).contiguous());
    return result;
  }
  Tensor out;
  if (residual.has_value()) {
    const auto sum = at::promote_types(type, residual->scalar_type());
    out = as_matrix(*residual).to(sum, /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Contiguous);
    if (bias.has_value()) out.add_(*bias);
  } else {
    out = at::empty({x.size(0), weight.size(0)}, x.options().dtype(type));
    if (bias.has_value()) out.copy_(*bias);
  }
  multiply_into(backend, (library & kLinearForward) != 0, type, out, x, weight.t(),
                residual.has_value() || bias.has_value() ? 1 : 0);
  return out;
}

template <Backend backend>
std::vector<Tensor> run_linear_group(const Tensor& x, at::TensorList weights, const OptionalTensors& biases,
                                     OptionalType dtype, int64_t library) {
  check_linear(kLinearGroupOp, x, weights, biases, dtype, library);
  const c10::OptionalDeviceGuard guard(x.device());
  const auto type = dtype.value_or(x.scalar_type());
  const Tensor rows = as_matrix(x).to(type);
  std::vector<Tensor> outputs;
  for (size_t i = 0; i < weights.size(); ++i) {
    const OptionalTensor bias = biases.empty() ? std::nullopt : biases.get(i);
    outputs.push_back(multiply_linear(backend, library, type, rows, weights[i], bias, std::nullopt)
                          .view_symint(with_last(x, weights[i].size(0))));
  }
  return outputs;
}

template <Backend backend>
Tensor run_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                  const OptionalTensor& residual, OptionalType dtype, int64_t library) {
  check_linear(kLinearOp, x, {weight}, {bias}, dtype, library);
  const auto shape = with_last(x, weight.sym_size(0));
  if (residual.has_value()) check_residual(*residual, shape, x);
  const c10::OptionalDeviceGuard guard(x.device());
  const auto type = dtype.value_or(x.scalar_type());
  return multiply_linear(backend, library, type, as_matrix(x).to(type), weight, bias, residual)
      .view_symint(shape);
}

// Returns gradients as the list that the operator returns. A gradient that is not selected is an empty
// tensor.
std::vector<Tensor> list_of(LinearGradients gradients, at::TensorList weights) {
  const Tensor none = at::empty({0}, weights[0].options());
  const auto fill = [&](Tensor& gradient) {
    if (!gradient.defined()) gradient = none;
  };
  fill(gradients.x);
  for (Tensor& gradient : gradients.weights) fill(gradient);
  std::vector<Tensor> list;
  gradients.append_to(list);
  return list;
}

// Returns the gradient of x, which is the sum over all layers of grad_output W, and for each layer the
// gradient of the weight, grad_output^T x. The sum over layers is formed by the products themselves.
template <Backend backend>
std::vector<Tensor> run_linear_group_backward(const OptionalTensors& grad_outputs, const OptionalTensor& x,
                                              at::TensorList weights, at::ScalarType dtype,
                                              at::ScalarType x_dtype, int64_t library,
                                              c10::List<bool> output_mask) {
  const c10::OptionalDeviceGuard guard(weights[0].device());
  const auto mask = LinearMask::from(output_mask);
  LinearGradients gradients(weights.size());
  Tensor grad_x;  // (tokens, in_features)
  bool first = true;
  for (size_t i = 0; i < weights.size(); ++i) {
    const OptionalTensor upstream = grad_outputs.get(i);
    if (!upstream.has_value()) continue;  // the loss does not depend on this layer's output
    const Tensor grad = as_matrix(*upstream).to(dtype);
    if (mask.x) {
      if (first) {
        grad_x = at::empty({grad.size(0), weights[i].size(1)}, grad.options().dtype(x_dtype));
        gradients.x = grad_x.view_symint(with_last(*upstream, weights[i].sym_size(1)));
      }
      multiply_into(backend, (library & kLinearGradX) != 0, dtype, grad_x, grad, weights[i], first ? 0 : 1);
      first = false;
    }
    if (mask.weights[i]) {
      gradients.weights[i] = at::empty(weights[i].sizes(), weights[i].options());
      multiply_into(backend, (library & kLinearGradWeight) != 0, dtype, gradients.weights[i], grad.t(),
                    as_matrix(*x), 0);
    }
  }
  return list_of(std::move(gradients), weights);
}

std::vector<Tensor> linear_group_meta(const Tensor& x, at::TensorList weights, const OptionalTensors& biases,
                                      OptionalType dtype, int64_t library) {
  check_linear(kLinearGroupOp, x, weights, biases, dtype, library);
  std::vector<Tensor> outputs;
  for (const Tensor& weight : weights) {
    outputs.push_back(at::empty_symint(with_last(x, weight.sym_size(0)),
                                       x.options().dtype(dtype.value_or(x.scalar_type()))));
  }
  return outputs;
}

Tensor linear_meta(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                   const OptionalTensor& residual, OptionalType dtype, int64_t library) {
  check_linear(kLinearOp, x, {weight}, {bias}, dtype, library);
  const auto shape = with_last(x, weight.sym_size(0));
  auto type = dtype.value_or(x.scalar_type());
  if (residual.has_value()) {
    check_residual(*residual, shape, x);
    type = at::promote_types(type, residual->scalar_type());
  }
  return at::empty_symint(shape, x.options().dtype(type));
}

std::vector<Tensor> linear_group_backward_meta(const OptionalTensors& grad_outputs, const OptionalTensor&,
                                               at::TensorList weights, at::ScalarType, at::ScalarType x_dtype,
                                               int64_t, c10::List<bool> output_mask) {
  const auto mask = LinearMask::from(output_mask);
  LinearGradients gradients(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    const OptionalTensor upstream = grad_outputs.get(i);
    if (mask.x && upstream.has_value()) {
      gradients.x =
          at::empty_symint(with_last(*upstream, weights[i].sym_size(1)), upstream->options().dtype(x_dtype));
    }
    if (mask.weights[i]) {
      gradients.weights[i] = at::empty_symint(weights[i].sym_sizes(), weights[i].options());
    }
  }
  return list_of(std::move(gradients), weights);
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl(kLinearOp, run_linear<Backend::kCpu>);
  m.impl(kLinearGroupOp, run_linear_group<Backend::kCpu>);
  m.impl(kLinearGroupBackwardOp, run_linear_group_backward<Backend::kCpu>);
}
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl(kLinearOp, run_linear<Backend::kCuda>);
  m.impl(kLinearGroupOp, run_linear_group<Backend::kCuda>);
  m.impl(kLinearGroupBackwardOp, run_linear_group_backward<Backend::kCuda>);
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl(kLinearOp, linear_meta);
  m.impl(kLinearGroupOp, linear_group_meta);
  m.impl(kLinearGroupBackwardOp, linear_group_backward_meta);
}

}  // namespace
}  // namespace shoestring::gemm

namespace shoestring {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
              const LinearOptions& options) {
  static auto op = find<gemm::LinearSignature>("shoestring::linear");
  return op.call(x, weight, bias, options.residual(), options.dtype(), options.library());
}

std::vector<Tensor> linear_group(const Tensor& x, at::TensorList weights,
                                 const std::vector<OptionalTensor>& biases, const LinearOptions& options) {
  TORCH_CHECK(!options.residual().has_value(),
              "linear_group: residual: expected nullopt, received a tensor; call linear for that layer");
  static auto op = find<gemm::LinearGroupSignature>("shoestring::linear_group");
  return op.call(x, weights, gemm::OptionalTensors(at::ArrayRef<OptionalTensor>(biases)), options.dtype(),
                 options.library());
}

}  // namespace shoestring
