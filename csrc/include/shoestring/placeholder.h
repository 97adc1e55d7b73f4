#pragma once

#include <ATen/core/Tensor.h>

#include <shoestring/export.h>

namespace shoestring {

/// A tensor of this shape in the memory of one element, NaN (a whole number: 0): what a module registers
/// where load_model is going to bring the values. (Not a tensor on the meta device: LibTorch cannot give such
/// a parameter values later.)
SHOESTRING_API at::Tensor placeholder(at::IntArrayRef shape, at::ScalarType dtype = at::kFloat);

}  // namespace shoestring
