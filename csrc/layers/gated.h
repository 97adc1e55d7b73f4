#pragma once

// Code shared by swiglu and geglu, which compute activation(gate) * up and its gradients. The activation's
// kernels are an argument.

#include <tuple>

#include <ATen/core/Tensor.h>

#include "core/tensors.h"
#include "layers/gated_table.h"

namespace shoestring::layers::gated {

struct Kernels {
  const char* name;  // name of the activation's CUDA kernel table
  const kernels::GatedTable& cpu;
};

/// Raises unless `gate` has the shape, dtype and device of `up`, which must be floating-point.
void check(const char* op, const at::Tensor& gate, const at::Tensor& up);
/// Checks the arguments of the backward operator as well: grad has the shape and dtype of up.
void check_backward(const char* op, const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up);

/// Returns activation(gate) * up for fp32, bf16 or fp16, computed in fp32 and rounded once.
at::Tensor forward(Backend backend, const Kernels& kernels, const at::Tensor& gate, const at::Tensor& up);

/// Returns the gradients of gate and up and, if with_product, also activation(gate) * up. Without
/// with_product, the third tensor is undefined.
std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(Backend backend, const Kernels& kernels,
                                                        const at::Tensor& grad, const at::Tensor& gate,
                                                        const at::Tensor& up, bool with_product);

/// Computes the gradients of gate and up, and writes them over gate and up, which must be contiguous and not
/// fp64. Their new memory would cost more time than the computation: its pages must be cleared first.
void backward_in_place(Backend backend, const Kernels& kernels, const at::Tensor& grad,
                       const at::Tensor& gate, const at::Tensor& up);

/// Returns whether a backward with the upstream gradient `grad` may overwrite the saved gate and up.
bool may_overwrite(const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up);

}  // namespace shoestring::layers::gated
