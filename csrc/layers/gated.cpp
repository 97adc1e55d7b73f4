#include "layers/gated.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include "core/cuda.h"
#include "core/huge_pages.h"
#include "core/saved_view.h"
#include "core/tensors.h"
#include "core/threads.h"
#include "layers/geglu_table.h"

namespace shoestring::layers::gated {

using at::Tensor;

namespace {

// Return the element i of a tensor, or null if the tensor is undefined.
float* floats_at(const Tensor& t, int64_t i) { return t.defined() ? t.data_ptr<float>() + i : nullptr; }
uint16_t* bits_at(const Tensor& t, int64_t i) { return t.defined() ? bits(t) + i : nullptr; }

void forward_cpu(const kernels::GatedTable& k, const Tensor& gate, const Tensor& up, const Tensor& out) {
  at::parallel_for(0, out.numel(), row_grain(3 * out.element_size()), [&](int64_t i, int64_t end) {
    if (gate.scalar_type() == at::kFloat)
      return k.forward_float(floats_at(gate, i), floats_at(up, i), end - i, floats_at(out, i));
    const auto run = gate.scalar_type() == at::kBFloat16 ? k.forward_bf16 : k.forward_fp16;
    run(bits_at(gate, i), bits_at(up, i), end - i, bits_at(out, i));
  });
}

void backward_cpu(const kernels::GatedTable& k, const Tensor& grad, const Tensor& gate, const Tensor& up,
                  const Tensor& grad_gate, const Tensor& grad_up, const Tensor& out) {
  at::parallel_for(0, grad.numel(), row_grain(5 * grad.element_size()), [&](int64_t i, int64_t end) {
    if (gate.scalar_type() == at::kFloat) {
      return k.backward_float(floats_at(grad, i), floats_at(gate, i), floats_at(up, i), end - i,
                              floats_at(grad_gate, i), floats_at(grad_up, i), floats_at(out, i));
    }
    const auto run = gate.scalar_type() == at::kBFloat16 ? k.backward_bf16 : k.backward_fp16;
    run(bits_at(grad, i), bits_at(gate, i), bits_at(up, i), end - i, bits_at(grad_gate, i),
        bits_at(grad_up, i), bits_at(out, i));
  });
}

void* address(const Tensor& t) { return t.defined() ? t.mutable_data_ptr() : nullptr; }

void forward_cuda(const char* name, const Tensor& gate, const Tensor& up, const Tensor& out) {
  if (out.numel() == 0) return;
  const auto& k = cuda::table<kernels::GatedCuda>(name);
  const auto dtype = gate.scalar_type();
  const auto run = dtype == at::kFloat      ? k.forward_float
                   : dtype == at::kBFloat16 ? k.forward_bf16
                                            : k.forward_fp16;
  check_launch(name, run(gate.const_data_ptr(), address(up), out.numel(), address(out), stream_of(out)));
}

void backward_cuda(const char* name, const Tensor& grad, const Tensor& gate, const Tensor& up,
                   const Tensor& grad_gate, const Tensor& grad_up, const Tensor& out) {
  if (grad.numel() == 0) return;
  const auto& k = cuda::table<kernels::GatedCuda>(name);
  const auto dtype = gate.scalar_type();
  const auto run = dtype == at::kFloat      ? k.backward_float
                   : dtype == at::kBFloat16 ? k.backward_bf16
                                            : k.backward_fp16;
  check_launch(name, run(grad.const_data_ptr(), gate.const_data_ptr(), address(up), grad.numel(),
                         address(grad_gate), address(grad_up), address(out), stream_of(grad)));
}

Tensor contiguous(const Tensor& t) { return t.defined() ? t.contiguous() : t; }
Tensor like(const Tensor& t) { return in_huge_pages(at::empty(t.sizes(), t.options())); }

void check_like(const char* op, const char* name, const Tensor& t, const char* model_name,
                const Tensor& model) {
  TORCH_CHECK(t.sym_sizes() == model.sym_sizes() && t.scalar_type() == model.scalar_type() &&
                  t.device() == model.device(),
              op, ": ", name, ": expected the shape, dtype and device of ", model_name, ", ",
              model.sym_sizes(), " of ", model.scalar_type(), " on ", model.device(), ", received ",
              t.sym_sizes(), " of ", t.scalar_type(), " on ", t.device());
}

}  // namespace

void check(const char* op, const Tensor& gate, const Tensor& up) {
  TORCH_CHECK(is_supported_float(up.scalar_type()), op, ": up: expected fp32, fp64, bf16 or fp16, received ",
              up.scalar_type());
  check_like(op, "gate", gate, "the tensor that it multiplies", up);
}

void check_backward(const char* op, const Tensor& grad, const Tensor& gate, const Tensor& up) {
  check(op, gate, up);
  check_like(op, "grad", grad, "up", up);
}

void check_approximate(const char* op, c10::string_view approximate) {
  TORCH_CHECK(approximate == "tanh" || approximate == "none", op,
              ": approximate: expected 'tanh' or 'none', received '", approximate, "'");
}

Kernels gelu_kernels(c10::string_view approximate) {
  if (approximate == "tanh") return {"geglu_tanh", cpu::geglu_tanh()};
  return {"geglu_erf", cpu::geglu_erf()};
}

Tensor forward(Backend backend, const Kernels& kernels, const Tensor& gate, const Tensor& up) {
  Tensor out = like(gate);
  if (backend == Backend::kCuda) {
    forward_cuda(kernels.name, gate.contiguous(), contiguous(up), out);
  } else {
    forward_cpu(kernels.cpu, gate.contiguous(), contiguous(up), out);
  }
  return out;
}

std::tuple<Tensor, Tensor, Tensor> backward(Backend backend, const Kernels& kernels, const Tensor& grad,
                                            const Tensor& gate, const Tensor& up, bool with_product) {
  Tensor grad_gate = like(gate), grad_up = up.defined() ? like(up) : Tensor(),
         out = with_product ? like(up) : Tensor();
  const Tensor upstream = grad.contiguous(), g = gate.contiguous(), u = contiguous(up);
  if (backend == Backend::kCuda) {
    backward_cuda(kernels.name, upstream, g, u, grad_gate, grad_up, out);
  } else {
    backward_cpu(kernels.cpu, upstream, g, u, grad_gate, grad_up, out);
  }
  return {grad_gate, grad_up, out};
}

void backward_in_place(Backend backend, const Kernels& kernels, const Tensor& grad, const Tensor& gate,
                       const Tensor& up) {
  for (const Tensor& t : {gate, up}) {
    TORCH_CHECK(!t.defined() || (t.is_contiguous() && t.scalar_type() != at::kDouble), kernels.name,
                ": gate, up: expected contiguous tensors of fp32, bf16 or fp16 to write over, received ",
                t.scalar_type(), " with strides ", t.strides());
  }
  const auto run = [&](auto of_device, const auto& k) {
    of_device(k, grad.contiguous(), gate, up, gate, up, Tensor());
  };
  if (backend == Backend::kCuda) {
    run(backward_cuda, kernels.name);
  } else {
    run(backward_cpu, kernels.cpu);
  }
}

void backward_and_value(Backend backend, const Kernels& kernels, const Tensor& grad, const Tensor& gate,
                        const Tensor& grad_gate) {
  TORCH_CHECK(grad.is_contiguous() && grad_gate.is_contiguous(), kernels.name,
              ": grad: expected contiguous tensors to write to, received strides ", grad.strides(), " and ",
              grad_gate.strides());
  if (backend == Backend::kCuda) {
    backward_cuda(kernels.name, grad, gate.contiguous(), Tensor(), grad_gate, grad, Tensor());
  } else {
    backward_cpu(kernels.cpu, grad, gate.contiguous(), Tensor(), grad_gate, grad, Tensor());
  }
}

bool may_overwrite(const Tensor& grad, const Tensor& gate, const Tensor& up) {
  return used_once(grad) && only_saved_view(gate) && (!up.defined() || only_saved_view(up)) &&
         gate.scalar_type() != at::kDouble;
}

}  // namespace shoestring::layers::gated
