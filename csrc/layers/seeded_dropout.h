#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include "core/tensors.h"
#include "layers/seeded_dropout_table.h"

namespace shoestring::layers {

/// Raises for an invalid probability or seed. A seed is required with dropout and refused without it (p = 0).
void check_dropout(const char* op, double p, const std::optional<at::Tensor>& seed, c10::Device device);

/// Returns the probability in units of 2^-16 and the matching scale for elements that are kept.
kernels::Dropout dropout_rule(double p);

/// Drops each element of x with probability p and divides the other elements by 1 - p. The mask is a function
/// of the seed and the index of the element.
at::Tensor drop(Backend backend, const at::Tensor& x, const at::Tensor& seed, double p);

}  // namespace shoestring::layers
