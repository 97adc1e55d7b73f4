#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

/// Functions for the norms of the rows of an adapted weight.
struct WeightNormTable {
  // Write the sum of squares of each of `count` rows. The rows have `columns` contiguous elements and start
  // `stride` elements apart.
  template <class T>
  using Squares = void (*)(const T* rows, int64_t stride, int64_t count, int64_t columns, float* sums);
  Squares<float> squares_float;
  Squares<uint16_t> squares_bf16, squares_fp16;

  // Writes the norms of `count` rows w + s b A, and returns whether all of them are finite. `squares` holds
  // |w|^2 of each row. A row of `products` holds A w as a sum of `parts` vectors, which lie side by side, and
  // rows start `stride` elements apart. b (count, rank) is contiguous, as is gram (rank, rank) = s / 2 A A^T.
  // `norms` may be `squares`.
  bool (*norms)(const float* squares, const float* products, int64_t parts, int64_t stride, const float* b,
                const float* gram, int64_t rank, float s, int64_t count, float* norms);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::WeightNormTable, weight_norm)
