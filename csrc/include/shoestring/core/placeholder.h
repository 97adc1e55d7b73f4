#pragma once

#include <ATen/core/Tensor.h>

#include <shoestring/core/export.h>

namespace shoestring {

/// Returns a tensor of this shape that occupies the memory of one element, NaN (0 for integer dtypes). A
/// module registers such tensors for parameters that load_model will fill. A tensor on the meta device would
/// not work: LibTorch cannot give such a parameter values later.
SHOESTRING_API at::Tensor placeholder(at::IntArrayRef shape, at::ScalarType dtype = at::kFloat);

}  // namespace shoestring
