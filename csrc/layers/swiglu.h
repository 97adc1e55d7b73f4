#pragma once

#include <tuple>

#include <ATen/core/Tensor.h>

#include "core/tensors.h"

namespace shoestring::layers {

/// Refuses a gate that does not go with `up`.
void check_swiglu(const char* op, const at::Tensor& gate, const at::Tensor& up);

/// silu(gate) * up, computed in fp32 (fp64 for fp64) and rounded once.
at::Tensor swiglu_forward(Backend backend, const at::Tensor& gate, const at::Tensor& up);

/// The gradients by gate and up and, with_product, silu(gate) * up once more; else that is undefined.
std::tuple<at::Tensor, at::Tensor, at::Tensor> swiglu_backward(Backend backend, const at::Tensor& grad,
                                                               const at::Tensor& gate, const at::Tensor& up,
                                                               bool with_product);

}  // namespace shoestring::layers
