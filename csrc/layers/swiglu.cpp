#include "layers/swiglu.h"

#include <ATen/Functions.h>
#include <torch/library.h>

#include <shoestring/layers/ops.h>

#include "core/call.h"
#include "layers/gated.h"
#include "layers/swiglu_table.h"

namespace shoestring::layers {

using at::Tensor;

namespace {

constexpr const char* kSwigluOp = "swiglu";

gated::Kernels swiglu_kernels() { return {kSwigluOp, cpu::swiglu()}; }

template <Backend backend>
Tensor run_swiglu(const Tensor& gate, const Tensor& up) {
  check_swiglu(kSwigluOp, gate, up);
  const c10::OptionalDeviceGuard guard(up.device());
  return swiglu_forward(backend, gate, up);
}

template <Backend backend>
std::tuple<Tensor, Tensor> run_swiglu_backward(const Tensor& grad, const Tensor& gate, const Tensor& up) {
  gated::check_backward("_swiglu_backward", grad, gate, up);
  const c10::OptionalDeviceGuard guard(up.device());
  auto [by_gate, by_up, product] = swiglu_backward(backend, grad, gate, up, false);
  return {by_gate, by_up};
}

template <Backend backend>
void run_swiglu_backward_in_place(const Tensor& grad, Tensor& gate, Tensor& up) {
  gated::check_backward("_swiglu_backward_", grad, gate, up);
  const c10::OptionalDeviceGuard guard(up.device());
  gated::backward_in_place(backend, swiglu_kernels(), grad, gate, up);
}

Tensor swiglu_meta(const Tensor& gate, const Tensor& up) {
  check_swiglu(kSwigluOp, gate, up);
  return at::empty_symint(up.sym_sizes(), up.options());
}
std::tuple<Tensor, Tensor> swiglu_backward_meta(const Tensor& grad, const Tensor& gate, const Tensor& up) {
  return {at::empty_symint(gate.sym_sizes(), gate.options()), at::empty_symint(up.sym_sizes(), up.options())};
}

void swiglu_backward_in_place_meta(const Tensor& grad, Tensor& gate, Tensor& up) {
  gated::check_backward("_swiglu_backward_", grad, gate, up);
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("swiglu", run_swiglu<Backend::kCpu>);
  m.impl("_swiglu_backward", run_swiglu_backward<Backend::kCpu>);
  m.impl("_swiglu_backward_", run_swiglu_backward_in_place<Backend::kCpu>);
}
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("swiglu", run_swiglu<Backend::kCuda>);
  m.impl("_swiglu_backward", run_swiglu_backward<Backend::kCuda>);
  m.impl("_swiglu_backward_", run_swiglu_backward_in_place<Backend::kCuda>);
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("swiglu", swiglu_meta);
  m.impl("_swiglu_backward", swiglu_backward_meta);
  m.impl("_swiglu_backward_", swiglu_backward_in_place_meta);
}

}  // namespace

void check_swiglu(const char* op, const Tensor& gate, const Tensor& up) { gated::check(op, gate, up); }

Tensor swiglu_forward(Backend backend, const Tensor& gate, const Tensor& up) {
  if (up.scalar_type() == at::kDouble) return at::silu(gate).mul_(up);
  return gated::forward(backend, swiglu_kernels(), gate, up);
}

std::tuple<Tensor, Tensor, Tensor> swiglu_backward(Backend backend, const Tensor& grad, const Tensor& gate,
                                                   const Tensor& up, bool with_product) {
  if (up.scalar_type() == at::kDouble) {
    const Tensor s = at::sigmoid(gate), silu = gate.mul(s);
    return {grad.mul(up).mul_(at::sigmoid(gate.neg()).mul_(silu).add_(s)), grad.mul(silu),
            with_product ? silu.mul(up) : Tensor()};
  }
  return gated::backward(backend, swiglu_kernels(), grad, gate, up, with_product);
}

}  // namespace shoestring::layers

namespace shoestring {

using at::Tensor;

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  static auto op = find<decltype(layers::swiglu_meta)>("shoestring::swiglu");
  return op.call(gate, up);
}

}  // namespace shoestring
