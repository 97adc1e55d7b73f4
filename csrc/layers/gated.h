#pragma once

// Code shared by swiglu and geglu, which compute activation(gate) * up and its gradients, and by gelu, which
// computes activation(gate). The activation's kernels are an argument.

#include <tuple>

#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>

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

/// Raises unless `approximate` is 'tanh' or 'none'.
void check_approximate(const char* op, c10::string_view approximate);
/// Returns the kernels of GELU, exact ('none') or with the tanh approximation.
Kernels gelu_kernels(c10::string_view approximate);

/// Returns activation(gate) * up for fp32, bf16 or fp16, computed in fp32 and rounded once. If `up` is
/// undefined, returns activation(gate).
at::Tensor forward(Backend backend, const Kernels& kernels, const at::Tensor& gate, const at::Tensor& up);

/// Returns the gradients of gate and up and, if with_product, also activation(gate) * up. Without
/// with_product, the third tensor is undefined. If `up` is undefined, only the first tensor is defined.
std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(Backend backend, const Kernels& kernels,
                                                        const at::Tensor& grad, const at::Tensor& gate,
                                                        const at::Tensor& up, bool with_product);

/// Computes the gradients of gate and, if defined, up, and writes them over gate and up, which must be
/// contiguous and not fp64. Their new memory would cost more time than the computation: its pages must be
/// cleared first.
void backward_in_place(Backend backend, const Kernels& kernels, const at::Tensor& grad,
                       const at::Tensor& gate, const at::Tensor& up);

/// Writes the gradient of gate to grad_gate, which may be gate, and activation(gate) over grad. The function
/// has no factor `up`. grad and grad_gate must be contiguous, and no dtype fp64.
void backward_and_value(Backend backend, const Kernels& kernels, const at::Tensor& grad,
                        const at::Tensor& gate, const at::Tensor& grad_gate);

/// Returns whether a backward with the upstream gradient `grad` may overwrite the saved gate and, if defined,
/// up.
bool may_overwrite(const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up = at::Tensor());

}  // namespace shoestring::layers::gated
