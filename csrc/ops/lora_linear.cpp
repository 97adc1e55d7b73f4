#include <tuple>

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <shoestring/ops.h>

#include "ops/base_weight.h"
#include "ops/call.h"

namespace shoestring {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Mask = std::array<bool, 4>;

constexpr const char* kOp = "lora_linear";

void check_float(const char* name, const Tensor& t, c10::Device device) {
  TORCH_CHECK(at::isFloatingType(t.scalar_type()) && t.device() == device, kOp, ": ", name,
              ": expected fp32, fp64, bf16 or fp16 on ", device, ", received ", t.scalar_type(), " on ", t.device());
}

void check(const Tensor& x, const Tensor& weight, const OptionalTensor& absmax, const OptionalTensor& nested,
           const OptionalTensor& bias, const Tensor& lora_A, const Tensor& lora_B, const OptionalTensor& dropped,
           c10::string_view quant_type, int64_t block_size) {
  TORCH_CHECK(x.dim() >= 1, kOp, ": x: expected shape (..., in_features), received a scalar");
  check_float("x", x, x.device());
  check_float("lora_A", lora_A, x.device());
  check_float("lora_B", lora_B, x.device());
  const auto in_features = x.sym_size(-1);
  TORCH_CHECK(lora_A.dim() == 2 && lora_A.sym_size(1) == in_features, kOp, ": lora_A: expected shape (rank, ",
              in_features, "), received ", lora_A.sym_sizes());
  TORCH_CHECK(lora_B.dim() == 2 && lora_B.sym_size(1) == lora_A.sym_size(0), kOp,
              ": lora_B: expected shape (out_features, ", lora_A.sym_size(0), "), the rank as in lora_A, received ",
              lora_B.sym_sizes());
  const auto out_features = lora_B.sym_size(0);
  if (absmax.has_value()) {
    check_packed(kOp, weight, *absmax, nested, out_features * in_features, quant_type, block_size, x.device());
  } else {
    TORCH_CHECK(!nested.has_value(), kOp, ": nested: expected none without absmax, received a tensor");
    TORCH_CHECK(weight.dim() == 2 && weight.sym_size(0) == out_features && weight.sym_size(1) == in_features, kOp,
                ": weight: expected shape (", out_features, ", ", in_features, "), received ", weight.sym_sizes());
    TORCH_CHECK(weight.scalar_type() == x.scalar_type() && weight.device() == x.device(), kOp,
                ": weight: expected x's dtype and device, ", x.scalar_type(), " on ", x.device(), ", received ",
                weight.scalar_type(), " on ", weight.device());
  }
  if (bias.has_value()) {
    check_float("bias", *bias, x.device());
    TORCH_CHECK(bias->dim() == 1 && bias->sym_size(0) == out_features, kOp, ": bias: expected shape (", out_features,
                "), received ", bias->sym_sizes());
  }
  if (dropped.has_value()) {
    TORCH_CHECK(dropped->sym_sizes() == x.sym_sizes() && dropped->scalar_type() == x.scalar_type() &&
                    dropped->device() == x.device(),
                kOp, ": dropped: expected x's shape, dtype and device, received ", dropped->sym_sizes(), " of ",
                dropped->scalar_type(), " on ", dropped->device());
  }
}

BaseWeight base(const Products& products, const Tensor& weight, const OptionalTensor& absmax,
                const OptionalTensor& nested, int64_t rows, int64_t columns, const Tensor& like,
                c10::string_view quant_type, int64_t block_size) {
  if (!absmax.has_value()) return BaseWeight::dense(weight, products.weight);
  return BaseWeight::quantized(PackedReader(products.backend, kOp, weight, *absmax, nested, quant_type, block_size),
                               rows, columns, like.options().dtype(products.weight));
}

// y = x W^T + bias + scaling * low B^T with low = x A^T (tokens, rank), which backward needs again and is small.
template <Backend backend>
std::tuple<Tensor, Tensor> forward(const Tensor& x, const Tensor& weight, const OptionalTensor& absmax,
                                   const OptionalTensor& nested, const OptionalTensor& bias, const Tensor& lora_A,
                                   const Tensor& lora_B, const OptionalTensor& dropped, double scaling,
                                   c10::string_view quant_type, int64_t block_size) {
  check(x, weight, absmax, nested, bias, lora_A, lora_B, dropped, quant_type, block_size);
  const c10::OptionalDeviceGuard guard(x.device());
  const Products products(backend, x);
  const auto other = products.other;
  const int64_t rows = lora_B.size(0), columns = x.size(-1);
  Tensor flat = as_matrix(x), wide = flat.to(other);
  Tensor low = multiply(products, dropped.has_value() ? as_matrix(*dropped).to(other) : wide, lora_A.to(other).t(),
                        compute_type(x));
  Tensor out = apply_weight(base(products, weight, absmax, nested, rows, columns, x, quant_type, block_size),
                            products.weight == other ? wide : flat, bias.has_value() ? bias->to(other) : Tensor(),
                            low.to(other), lora_B.to(other), scaling, x.scalar_type(), products);
  return {out.view_symint(with_last(x, rows)), low};
}

Tensor none(const Tensor& like) { return at::empty({0}, like.options()); }

// branch is the input of A: dropped, or x. With G the upstream gradient and D = scaling * G B:
//   grad_x = G W (+ D A where branch is x),  grad_dropped = D A,  grad_A = D^T branch,  grad_B = scaling * G^T low.
template <Backend backend>
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_output, const Tensor& branch, const Tensor& low,
                                                    const Tensor& weight, const OptionalTensor& absmax,
                                                    const OptionalTensor& nested, const Tensor& lora_A,
                                                    const Tensor& lora_B, bool dropout, double scaling,
                                                    c10::string_view quant_type, int64_t block_size, Mask mask) {
  const c10::OptionalDeviceGuard guard(grad_output.device());
  const Products products(backend, grad_output);
  const auto dtype = branch.scalar_type(), other = products.other;
  const int64_t rows = lora_B.size(0), columns = branch.size(-1);
  Tensor flat = as_matrix(grad_output), grad = flat.to(other), A = lora_A.to(other);
  Tensor grad_low = multiply(products, grad, lora_B.to(other), other, scaling);  // (tokens, rank)
  Tensor grad_x = none(branch), grad_dropped = none(branch), grad_A = none(lora_A), grad_B = none(lora_B);
  if (mask[0]) {
    const auto weights = base(products, weight, absmax, nested, rows, columns, grad_output, quant_type, block_size);
    grad_x = times_weight(weights, products.weight == other ? grad : flat, dropout ? Tensor() : grad_low,
                          dropout ? Tensor() : A, products)
                 .to(dtype)
                 .view_symint(branch.sym_sizes());
  }
  if (mask[1]) grad_dropped = multiply(products, grad_low, A, dtype).view_symint(branch.sym_sizes());
  if (mask[2]) grad_A = multiply(products, grad_low.t(), as_matrix(branch).to(other), lora_A.scalar_type());
  if (mask[3]) grad_B = multiply(products, grad.t(), low.to(other), lora_B.scalar_type(), scaling);
  return {grad_x, grad_dropped, grad_A, grad_B};
}

std::tuple<Tensor, Tensor> forward_meta(const Tensor& x, const Tensor& weight, const OptionalTensor& absmax,
                                        const OptionalTensor& nested, const OptionalTensor& bias, const Tensor& lora_A,
                                        const Tensor& lora_B, const OptionalTensor& dropped, double,
                                        c10::string_view quant_type, int64_t block_size) {
  check(x, weight, absmax, nested, bias, lora_A, lora_B, dropped, quant_type, block_size);
  c10::SymInt tokens = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) tokens = tokens * x.sym_size(i);
  return {at::empty_symint(with_last(x, lora_B.sym_size(0)), x.options()),
          at::empty_symint({tokens, lora_A.sym_size(0)}, x.options().dtype(compute_type(x)))};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_meta(const Tensor&, const Tensor& branch, const Tensor&,
                                                         const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                                         const Tensor& lora_A, const Tensor& lora_B, bool, double,
                                                         c10::string_view, int64_t, Mask mask) {
  const auto make = [](bool wanted, const Tensor& like) {
    return wanted ? at::empty_symint(like.sym_sizes(), like.options()) : none(like);
  };
  return {make(mask[0], branch), make(mask[1], branch), make(mask[2], lora_A), make(mask[3], lora_B)};
}

// Without gradients the operator is its forward part, on every device.
Tensor output_only(const Tensor& x, const Tensor& weight, const OptionalTensor& absmax, const OptionalTensor& nested,
                   const OptionalTensor& bias, const Tensor& lora_A, const Tensor& lora_B,
                   const OptionalTensor& dropped, double scaling, c10::string_view quant_type, int64_t block_size) {
  static auto op = find<decltype(forward_meta)>("shoestring::lora_linear_forward");
  return std::get<0>(
      op.call(x, weight, absmax, nested, bias, lora_A, lora_B, dropped, scaling, quant_type, block_size));
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("lora_linear_forward", forward<Backend::kCpu>);
  m.impl("lora_linear_backward", backward<Backend::kCpu>);
}
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("lora_linear_forward", forward<Backend::kCuda>);
  m.impl("lora_linear_backward", backward<Backend::kCuda>);
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("lora_linear_forward", forward_meta);
  m.impl("lora_linear_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) { m.impl("lora_linear", output_only); }

}  // namespace

Tensor lora_linear(const Tensor& x, const Tensor& weight, const Tensor& lora_A, const Tensor& lora_B, double scaling,
                   const OptionalTensor& bias, const OptionalTensor& absmax, const OptionalTensor& nested,
                   const OptionalTensor& dropped, const QuantizeOptions& options) {
  static auto op = find<decltype(output_only)>("shoestring::lora_linear");
  return op.call(x, weight, absmax, nested, bias, lora_A, lora_B, dropped, scaling, options.quant_type(),
                 options.block_size());
}

}  // namespace shoestring
