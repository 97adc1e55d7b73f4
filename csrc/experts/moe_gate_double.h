#pragma once

// The gates of experts in fp64, with PyTorch's operators, for gradient checks on any device.

#include <ATen/core/Tensor.h>

#include "experts/moe_gate_table.h"

namespace shoestring::experts {

/// Writes the gated features of the rows of h to a.
void gate_in_double(const kernels::Gate& gate, const at::Tensor& h, const at::Tensor& a);

/// Writes scale * a over `grad`, the gradient of a without the factor, and writes the gradient of h to
/// grad_h. scale has an element for each row. Returns its gradient.
at::Tensor gate_backward_in_double(const kernels::Gate& gate, const at::Tensor& h, const at::Tensor& scale,
                                   const at::Tensor& grad, const at::Tensor& grad_h);

}  // namespace shoestring::experts
