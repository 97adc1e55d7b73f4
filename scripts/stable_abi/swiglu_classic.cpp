// silu(gate) * up in fp32 and bf16 on the CPU, with a gradient, registered as the rest of shoestring is.
// docs/internals/stable_abi.md compares this file with swiglu_stable.cpp.
#include <cmath>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

using at::Tensor;

namespace {

template <typename T>
void loop(const Tensor& gate, const Tensor& up, const Tensor& out) {
  const T *g = gate.const_data_ptr<T>(), *u = up.const_data_ptr<T>();
  T* o = out.mutable_data_ptr<T>();
  at::parallel_for(0, out.numel(), 1 << 15, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float x = static_cast<float>(g[i]);
      o[i] = static_cast<T>(x / (1 + std::exp(-x)) * static_cast<float>(u[i]));
    }
  });
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  TORCH_CHECK(gate.sizes() == up.sizes(), "swiglu: up: expected the shape of gate");
  TORCH_CHECK(gate.scalar_type() == up.scalar_type(), "swiglu: up: expected the dtype of gate");
  TORCH_CHECK(gate.is_contiguous() && up.is_contiguous(), "swiglu: expected contiguous tensors");
  Tensor out = at::empty_like(up);
  switch (up.scalar_type()) {
    case at::kFloat:
      loop<float>(gate, up, out);
      break;
    case at::kBFloat16:
      loop<at::BFloat16>(gate, up, out);
      break;
    default:
      TORCH_CHECK(false, "swiglu: up: expected fp32 or bf16");
  }
  return out;
}

Tensor swiglu_meta(const Tensor& gate, const Tensor& up) { return at::empty_like(up); }

Tensor call(const Tensor& gate, const Tensor& up) {
  static auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("trial_classic::swiglu", "").typed<decltype(swiglu)>();
  return op.call(gate, up);
}

struct Swiglu : torch::autograd::Function<Swiglu> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& gate, const Tensor& up) {
    context->save_for_backward({gate, up});
    const at::AutoDispatchBelowADInplaceOrView below;
    return call(gate, up);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const Tensor s = at::sigmoid(saved[0]), silu = saved[0] * s;
    return {grads[0] * saved[1] * (s + silu * (1 - s)), grads[0] * silu};
  }
};

Tensor swiglu_autograd(const Tensor& gate, const Tensor& up) { return Swiglu::apply(gate, up); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(trial_classic, m) { m.def("swiglu(Tensor gate, Tensor up) -> Tensor"); }
TORCH_LIBRARY_IMPL(trial_classic, CPU, m) { m.impl("swiglu", swiglu); }
TORCH_LIBRARY_IMPL(trial_classic, Meta, m) { m.impl("swiglu", swiglu_meta); }
TORCH_LIBRARY_IMPL(trial_classic, Autograd, m) { m.impl("swiglu", swiglu_autograd); }
