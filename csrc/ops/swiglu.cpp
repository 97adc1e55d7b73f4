#include "ops/swiglu.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <shoestring/ops.h>

#include "kernels/swiglu.h"
#include "ops/call.h"
#include "ops/cuda.h"

namespace shoestring {

using at::Tensor;

namespace {

constexpr const char* kOp = "swiglu";
constexpr int64_t kGrain = int64_t{1} << 14;  // elements that a thread is worth starting for

uint16_t* bits(const Tensor& t) { return static_cast<uint16_t*>(t.mutable_data_ptr()); }
float* floats(const Tensor& t) { return t.data_ptr<float>(); }

void forward_cpu(const Tensor& gate, const Tensor& up, const Tensor& out) {
  const auto& k = cpu::swiglu();
  at::parallel_for(0, out.numel(), kGrain, [&](int64_t i, int64_t end) {
    if (gate.scalar_type() == at::kFloat) return k.forward_float(floats(gate) + i, floats(up) + i, end - i, floats(out) + i);
    const auto run = gate.scalar_type() == at::kBFloat16 ? k.forward_bf16 : k.forward_fp16;
    run(bits(gate) + i, bits(up) + i, end - i, bits(out) + i);
  });
}

void backward_cpu(const Tensor& grad, const Tensor& gate, const Tensor& up, const Tensor& grad_gate,
                  const Tensor& grad_up, const Tensor& out) {
  const auto& k = cpu::swiglu();
  at::parallel_for(0, grad.numel(), kGrain, [&](int64_t i, int64_t end) {
    if (gate.scalar_type() == at::kFloat) {
      return k.backward_float(floats(grad) + i, floats(gate) + i, floats(up) + i, end - i, floats(grad_gate) + i,
                              floats(grad_up) + i, out.defined() ? floats(out) + i : nullptr);
    }
    const auto run = gate.scalar_type() == at::kBFloat16 ? k.backward_bf16 : k.backward_fp16;
    run(bits(grad) + i, bits(gate) + i, bits(up) + i, end - i, bits(grad_gate) + i, bits(grad_up) + i,
        out.defined() ? bits(out) + i : nullptr);
  });
}

void forward_cuda(const Tensor& gate, const Tensor& up, const Tensor& out) {
  if (out.numel() == 0) return;
  const auto& k = cuda::table<kernels::SwigluCuda>(kOp);
  const auto dtype = gate.scalar_type();
  const auto run = dtype == at::kFloat ? k.forward_float : dtype == at::kBFloat16 ? k.forward_bf16 : k.forward_fp16;
  check_launch(kOp, run(gate.const_data_ptr(), up.const_data_ptr(), out.numel(), out.mutable_data_ptr(), stream_of(out)));
}

void backward_cuda(const Tensor& grad, const Tensor& gate, const Tensor& up, const Tensor& grad_gate,
                   const Tensor& grad_up, const Tensor& out) {
  if (grad.numel() == 0) return;
  const auto& k = cuda::table<kernels::SwigluCuda>(kOp);
  const auto dtype = gate.scalar_type();
  const auto run = dtype == at::kFloat ? k.backward_float : dtype == at::kBFloat16 ? k.backward_bf16 : k.backward_fp16;
  check_launch(kOp, run(grad.const_data_ptr(), gate.const_data_ptr(), up.const_data_ptr(), grad.numel(),
                        grad_gate.mutable_data_ptr(), grad_up.mutable_data_ptr(),
                        out.defined() ? out.mutable_data_ptr() : nullptr, stream_of(grad)));
}

Tensor like(const Tensor& t) { return at::empty(t.sizes(), t.options()); }

template <Backend backend>
Tensor forward(const Tensor& gate, const Tensor& up) {
  check_swiglu(kOp, gate, up);
  const c10::OptionalDeviceGuard guard(up.device());
  return swiglu_forward(backend, gate, up);
}

template <Backend backend>
std::tuple<Tensor, Tensor> backward(const Tensor& grad, const Tensor& gate, const Tensor& up) {
  const c10::OptionalDeviceGuard guard(up.device());
  auto [by_gate, by_up, product] = swiglu_backward(backend, grad, gate, up, false);
  return {by_gate, by_up};
}

Tensor forward_meta(const Tensor& gate, const Tensor& up) {
  check_swiglu(kOp, gate, up);
  return at::empty_symint(up.sym_sizes(), up.options());
}
std::tuple<Tensor, Tensor> backward_meta(const Tensor& grad, const Tensor& gate, const Tensor& up) {
  return {at::empty_symint(gate.sym_sizes(), gate.options()), at::empty_symint(up.sym_sizes(), up.options())};
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("swiglu", forward<Backend::kCpu>);
  m.impl("swiglu_backward", backward<Backend::kCpu>);
}
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("swiglu", forward<Backend::kCuda>);
  m.impl("swiglu_backward", backward<Backend::kCuda>);
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("swiglu", forward_meta);
  m.impl("swiglu_backward", backward_meta);
}

}  // namespace

void check_swiglu(const char* op, const Tensor& gate, const Tensor& up) {
  TORCH_CHECK(at::isFloatingType(up.scalar_type()), op, ": x: expected fp32, fp64, bf16 or fp16, received ",
              up.scalar_type());
  TORCH_CHECK(gate.sym_sizes() == up.sym_sizes() && gate.scalar_type() == up.scalar_type() &&
                  gate.device() == up.device(),
              op, ": gate: expected the shape, dtype and device of what it multiplies, ", up.sym_sizes(), " of ",
              up.scalar_type(), " on ", up.device(), ", received ", gate.sym_sizes(), " of ", gate.scalar_type(), " on ",
              gate.device());
}

Tensor swiglu_forward(Backend backend, const Tensor& gate, const Tensor& up) {
  if (up.scalar_type() == at::kDouble) return at::silu(gate).mul_(up);
  Tensor out = like(up);
  (backend == Backend::kCuda ? forward_cuda : forward_cpu)(gate.contiguous(), up.contiguous(), out);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> swiglu_backward(Backend backend, const Tensor& grad, const Tensor& gate,
                                                   const Tensor& up, bool with_product) {
  if (up.scalar_type() == at::kDouble) {
    const Tensor s = at::sigmoid(gate), silu = gate.mul(s);
    return {grad.mul(up).mul_(at::sigmoid(gate.neg()).mul_(silu).add_(s)), grad.mul(silu),
            with_product ? silu.mul(up) : Tensor()};
  }
  Tensor grad_gate = like(gate), grad_up = like(up), out = with_product ? like(up) : Tensor();
  (backend == Backend::kCuda ? backward_cuda : backward_cpu)(grad.contiguous(), gate.contiguous(), up.contiguous(),
                                                             grad_gate, grad_up, out);
  return {grad_gate, grad_up, out};
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  static auto op = find<decltype(forward_meta)>("shoestring::swiglu");
  return op.call(gate, up);
}

}  // namespace shoestring
