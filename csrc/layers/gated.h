#pragma once

// activation(gate) * up and its gradients, which swiglu and geglu share. The activation's kernels are an
// argument.

#include <tuple>

#include <ATen/core/Tensor.h>

#include "core/tensors.h"
#include "layers/gated_table.h"

namespace shoestring::layers::gated {

struct Kernels {
  const char* name;  // name of the operator's kernel table on CUDA
  const kernels::GatedTable& cpu;
};

/// Raises unless `gate` has the shape, dtype and device of `up`, which must be floating-point.
void check(const char* op, const at::Tensor& gate, const at::Tensor& up);

/// Returns activation(gate) * up for fp32, bf16 or fp16, computed in fp32 and rounded once.
at::Tensor forward(Backend backend, const Kernels& kernels, const at::Tensor& gate, const at::Tensor& up);

/// Returns the gradients of gate and up and, if with_product, activation(gate) * up. Otherwise the third
/// tensor is undefined.
std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(Backend backend, const Kernels& kernels,
                                                        const at::Tensor& grad, const at::Tensor& gate,
                                                        const at::Tensor& up, bool with_product);

}  // namespace shoestring::layers::gated
