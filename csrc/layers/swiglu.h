#pragma once

#include <tuple>

#include <ATen/core/Tensor.h>

#include "core/tensors.h"

namespace shoestring::layers {

/// Returns silu(gate) * up, computed in fp32 (fp64 for fp64) and rounded once.
at::Tensor swiglu_forward(Backend backend, const at::Tensor& gate, const at::Tensor& up);

/// Returns the gradients of gate and up and, if with_product, also silu(gate) * up. Without with_product, the
/// third tensor is undefined.
std::tuple<at::Tensor, at::Tensor, at::Tensor> swiglu_backward(Backend backend, const at::Tensor& grad,
                                                               const at::Tensor& gate, const at::Tensor& up,
                                                               bool with_product);

}  // namespace shoestring::layers
