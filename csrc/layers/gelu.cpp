// gelu(x), with the kernels of geglu without the factor `up`.

#include <ATen/Functions.h>
#include <torch/library.h>

#include <shoestring/layers/ops.h>

#include "core/call.h"
#include "core/cuda.h"
#include "layers/gated.h"

namespace shoestring::layers {
namespace {

using at::Tensor;

constexpr const char* kGeluOp = "gelu";

void check_gelu(const Tensor& x, c10::string_view approximate) {
  TORCH_CHECK(is_supported_float(x.scalar_type()), kGeluOp,
              ": x: expected fp32, fp64, bf16 or fp16, received ", x.scalar_type());
  gated::check_approximate(kGeluOp, approximate);
}

void check_gelu_backward(const char* op, const Tensor& grad, const Tensor& x, c10::string_view approximate) {
  check_gelu(x, approximate);
  TORCH_CHECK(grad.sym_sizes() == x.sym_sizes() && grad.scalar_type() == x.scalar_type() &&
                  grad.device() == x.device(),
              op, ": grad: expected the shape, dtype and device of x, ", x.sym_sizes(), " of ",
              x.scalar_type(), " on ", x.device(), ", received ", grad.sym_sizes(), " of ",
              grad.scalar_type(), " on ", grad.device());
}

template <Backend backend>
Tensor run_gelu(const Tensor& x, c10::string_view approximate) {
  check_gelu(x, approximate);
  const c10::OptionalDeviceGuard guard(x.device());
  if (x.scalar_type() == at::kDouble) return at::gelu(x.contiguous(), approximate);
  return gated::forward(backend, gated::gelu_kernels(approximate), x, Tensor());
}

template <Backend backend>
Tensor run_gelu_backward(const Tensor& grad, const Tensor& x, c10::string_view approximate) {
  check_gelu_backward("_gelu_backward", grad, x, approximate);
  const c10::OptionalDeviceGuard guard(x.device());
  if (x.scalar_type() == at::kDouble)
    return at::gelu_backward(grad.contiguous(), x.contiguous(), approximate);
  return std::get<0>(gated::backward(backend, gated::gelu_kernels(approximate), grad, x, Tensor(), false));
}

template <Backend backend>
void run_gelu_backward_in_place(const Tensor& grad, Tensor& x, c10::string_view approximate) {
  check_gelu_backward("_gelu_backward_", grad, x, approximate);
  const c10::OptionalDeviceGuard guard(x.device());
  gated::backward_in_place(backend, gated::gelu_kernels(approximate), grad, x, Tensor());
}

void check_gelu_value(const Tensor& grad, const Tensor& x, const Tensor& grad_x,
                      c10::string_view approximate) {
  check_gelu_backward("_gelu_backward_value_", grad, x, approximate);
  check_gelu_backward("_gelu_backward_value_", grad_x, x, approximate);
}

template <Backend backend>
void run_gelu_backward_value(Tensor& grad, const Tensor& x, Tensor& grad_x, c10::string_view approximate) {
  check_gelu_value(grad, x, grad_x, approximate);
  const c10::OptionalDeviceGuard guard(x.device());
  if (x.scalar_type() == at::kDouble) {
    const Tensor value = at::gelu(x, approximate);
    grad_x.copy_(at::gelu_backward(grad, x, approximate));
    grad.copy_(value);
    return;
  }
  gated::backward_and_value(backend, gated::gelu_kernels(approximate), grad, x, grad_x);
}

Tensor gelu_meta(const Tensor& x, c10::string_view approximate) {
  check_gelu(x, approximate);
  return at::empty_symint(x.sym_sizes(), x.options());
}
Tensor gelu_backward_meta(const Tensor& grad, const Tensor& x, c10::string_view approximate) {
  check_gelu_backward("_gelu_backward", grad, x, approximate);
  return at::empty_symint(x.sym_sizes(), x.options());
}
void gelu_backward_in_place_meta(const Tensor& grad, Tensor& x, c10::string_view approximate) {
  check_gelu_backward("_gelu_backward_", grad, x, approximate);
}
void gelu_backward_value_meta(Tensor& grad, const Tensor& x, Tensor& grad_x, c10::string_view approximate) {
  check_gelu_value(grad, x, grad_x, approximate);
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("gelu", run_gelu<Backend::kCpu>);
  m.impl("_gelu_backward", run_gelu_backward<Backend::kCpu>);
  m.impl("_gelu_backward_", run_gelu_backward_in_place<Backend::kCpu>);
  m.impl("_gelu_backward_value_", run_gelu_backward_value<Backend::kCpu>);
}
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("gelu", run_gelu<Backend::kCuda>);
  m.impl("_gelu_backward", run_gelu_backward<Backend::kCuda>);
  m.impl("_gelu_backward_", run_gelu_backward_in_place<Backend::kCuda>);
  m.impl("_gelu_backward_value_", run_gelu_backward_value<Backend::kCuda>);
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("gelu", gelu_meta);
  m.impl("_gelu_backward", gelu_backward_meta);
  m.impl("_gelu_backward_", gelu_backward_in_place_meta);
  m.impl("_gelu_backward_value_", gelu_backward_value_meta);
}

}  // namespace

}  // namespace shoestring::layers

namespace shoestring {

using at::Tensor;

Tensor gelu(const Tensor& x, const std::string& approximate) {
  static auto op = find<decltype(layers::gelu_meta)>("shoestring::gelu");
  return op.call(x, approximate);
}

}  // namespace shoestring
