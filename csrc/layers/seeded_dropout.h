#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include "core/tensors.h"
#include "layers/seeded_dropout_table.h"

namespace shoestring::layers {

/// Refuses a probability or a seed that dropout cannot have. Without dropout (p = 0) there is no seed.
void check_dropout(const char* op, double p, const std::optional<at::Tensor>& seed, c10::Device device);

/// The probability as 16 bits have it; what is kept is scaled for that one.
kernels::Dropout dropout_rule(double p);

/// x with each element dropped with probability p, or divided by 1 - p: the mask is a function of the seed
/// and the place.
at::Tensor drop(Backend backend, const at::Tensor& x, const at::Tensor& seed, double p);

}  // namespace shoestring::layers
