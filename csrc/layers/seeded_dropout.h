#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include "core/tensors.h"
#include "layers/seeded_dropout_table.h"

namespace shoestring::layers {

/// Raises if the dropout probability p or the seed is invalid. A seed must be given if p > 0, and must not be
/// given if p = 0.
void check_dropout(const char* op, double p, const std::optional<at::Tensor>& seed, c10::Device device);

/// Returns the dropout probability p, rounded to a multiple of 2^-16, and the scale of the remaining
/// elements.
kernels::Dropout dropout_rule(double p);

/// Drops each element of x with probability p and divides the remaining elements by 1 - p. The mask depends
/// only on the seed and the index of the element.
at::Tensor drop(Backend backend, const at::Tensor& x, const at::Tensor& seed, double p);

}  // namespace shoestring::layers
