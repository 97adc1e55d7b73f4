#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>

#include "core/elementwise.h"

namespace shoestring::layers {

/// Raises unless `gate` has the shape, dtype and device of `up`, which must be floating-point.
inline void check_gated(const char* op, const at::Tensor& gate, const at::Tensor& up) {
  elementwise::check_float(op, "up", up);
  elementwise::check_like(op, "gate", gate, "the tensor that it multiplies", up);
}

/// Raises unless `approximate` is 'tanh' or 'none'.
inline void check_approximate(const char* op, c10::string_view approximate) {
  TORCH_CHECK(approximate == "tanh" || approximate == "none", op,
              ": approximate: expected 'tanh' or 'none', received '", approximate, "'");
}

}  // namespace shoestring::layers
