#include <ATen/Functions.h>
#include <torch/library.h>

#include <shoestring/layers/ops.h>

#include "core/call.h"
#include "core/cuda.h"
#include "layers/gated.h"

namespace shoestring::layers {
namespace {

using at::Tensor;

constexpr const char* kGegluOp = "geglu";

void check_geglu(const Tensor& gate, const Tensor& up, c10::string_view approximate) {
  gated::check(kGegluOp, gate, up);
  gated::check_approximate(kGegluOp, approximate);
}

template <Backend backend>
Tensor run_geglu(const Tensor& gate, const Tensor& up, c10::string_view approximate) {
  check_geglu(gate, up, approximate);
  const c10::OptionalDeviceGuard guard(up.device());
  if (up.scalar_type() == at::kDouble) return at::gelu(gate, approximate).mul_(up);
  return gated::forward(backend, gated::gelu_kernels(approximate), gate, up);
}

template <Backend backend>
std::tuple<Tensor, Tensor> run_geglu_backward(const Tensor& grad, const Tensor& gate, const Tensor& up,
                                              c10::string_view approximate) {
  gated::check_backward("_geglu_backward", grad, gate, up);
  const c10::OptionalDeviceGuard guard(up.device());
  if (up.scalar_type() == at::kDouble) {
    return {at::gelu_backward(grad.mul(up), gate, approximate), at::gelu(gate, approximate).mul_(grad)};
  }
  const auto gradients = gated::backward(backend, gated::gelu_kernels(approximate), grad, gate, up, false);
  return {std::get<0>(gradients), std::get<1>(gradients)};
}

template <Backend backend>
void run_geglu_backward_in_place(const Tensor& grad, Tensor& gate, Tensor& up, c10::string_view approximate) {
  gated::check_backward("_geglu_backward_", grad, gate, up);
  const c10::OptionalDeviceGuard guard(up.device());
  gated::backward_in_place(backend, gated::gelu_kernels(approximate), grad, gate, up);
}

Tensor geglu_meta(const Tensor& gate, const Tensor& up, c10::string_view approximate) {
  check_geglu(gate, up, approximate);
  return at::empty_symint(up.sym_sizes(), up.options());
}
std::tuple<Tensor, Tensor> geglu_backward_meta(const Tensor& grad, const Tensor& gate, const Tensor& up,
                                               c10::string_view) {
  return {at::empty_symint(gate.sym_sizes(), gate.options()), at::empty_symint(up.sym_sizes(), up.options())};
}

void geglu_backward_in_place_meta(const Tensor& grad, Tensor& gate, Tensor& up, c10::string_view) {
  gated::check_backward("_geglu_backward_", grad, gate, up);
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("geglu", run_geglu<Backend::kCpu>);
  m.impl("_geglu_backward", run_geglu_backward<Backend::kCpu>);
  m.impl("_geglu_backward_", run_geglu_backward_in_place<Backend::kCpu>);
}
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("geglu", run_geglu<Backend::kCuda>);
  m.impl("_geglu_backward", run_geglu_backward<Backend::kCuda>);
  m.impl("_geglu_backward_", run_geglu_backward_in_place<Backend::kCuda>);
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("geglu", geglu_meta);
  m.impl("_geglu_backward", geglu_backward_meta);
  m.impl("_geglu_backward_", geglu_backward_in_place_meta);
}

}  // namespace

}  // namespace shoestring::layers

namespace shoestring {

using at::Tensor;

Tensor geglu(const Tensor& gate, const Tensor& up, const std::string& approximate) {
  static auto op = find<decltype(layers::geglu_meta)>("shoestring::geglu");
  return op.call(gate, up, approximate);
}

}  // namespace shoestring
