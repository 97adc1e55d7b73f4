// silu(gate) * up in fp32 and bf16 on the CPU, registered through LibTorch's stable ABI. The gradient is in
// measure.py. docs/internals/stable_abi.md compares this file with swiglu_classic.cpp.
#include <cmath>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

template <typename T>
void loop(const Tensor& gate, const Tensor& up, const Tensor& out) {
  const T *g = static_cast<const T*>(gate.const_data_ptr()), *u = static_cast<const T*>(up.const_data_ptr());
  T* o = static_cast<T*>(out.mutable_data_ptr());
  torch::stable::parallel_for(0, out.numel(), 1 << 15, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float x = static_cast<float>(g[i]);
      o[i] = static_cast<T>(x / (1 + std::exp(-x)) * static_cast<float>(u[i]));
    }
  });
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  STD_TORCH_CHECK(gate.sizes().equals(up.sizes()), "swiglu: up: expected the shape of gate");
  STD_TORCH_CHECK(gate.scalar_type() == up.scalar_type(), "swiglu: up: expected the dtype of gate");
  STD_TORCH_CHECK(gate.is_contiguous() && up.is_contiguous(), "swiglu: expected contiguous tensors");
  Tensor out = torch::stable::empty_like(up);
  switch (up.scalar_type()) {
    case ScalarType::Float:
      loop<float>(gate, up, out);
      break;
    case ScalarType::BFloat16:
      loop<torch::headeronly::BFloat16>(gate, up, out);
      break;
    default:
      STD_TORCH_CHECK(false, "swiglu: up: expected fp32 or bf16");
  }
  return out;
}

Tensor swiglu_meta(const Tensor& gate, const Tensor& up) { return torch::stable::empty_like(up); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(trial_stable, m) { m.def("swiglu(Tensor gate, Tensor up) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(trial_stable, CPU, m) { m.impl("swiglu", TORCH_BOX(&swiglu)); }
STABLE_TORCH_LIBRARY_IMPL(trial_stable, Meta, m) { m.impl("swiglu", TORCH_BOX(&swiglu_meta)); }
