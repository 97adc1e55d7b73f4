#pragma once

// What swiglu and geglu share: activation(gate) * up, from the kernels of the activation.

#include <tuple>

#include <ATen/core/Tensor.h>

#include "core/tensors.h"
#include "layers/gated_table.h"

namespace shoestring::layers::gated {

struct Kernels {
  const char* name;  // of the operator's table on CUDA
  const kernels::GatedTable& cpu;
};

/// Refuses a gate that does not go with `up`.
void check(const char* op, const at::Tensor& gate, const at::Tensor& up);

/// fp32, bf16 or fp16, computed in fp32 and rounded once.
at::Tensor forward(Backend backend, const Kernels& kernels, const at::Tensor& gate, const at::Tensor& up);

/// The gradients by gate and up and, with_product, the product once more; else that is undefined.
std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(Backend backend, const Kernels& kernels,
                                                        const at::Tensor& grad, const at::Tensor& gate,
                                                        const at::Tensor& up, bool with_product);

}  // namespace shoestring::layers::gated
