#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

/// Writes the dot product of each column: sums[c] = sum over `rows` rows of a[., c] (b[., c] - offset[c]),
/// for columns [begin, end). Successive rows of a and b are `stride` elements apart. A null offset counts as
/// 0.
struct ColumnDotsTable {
  void (*dots_float)(const float* a, const float* b, const float* offset, int64_t rows, int64_t stride,
                     int64_t begin, int64_t end, float* sums);
  void (*dots_bf16)(const uint16_t* a, const uint16_t* b, const float* offset, int64_t rows, int64_t stride,
                    int64_t begin, int64_t end, float* sums);
  void (*dots_fp16)(const uint16_t* a, const uint16_t* b, const float* offset, int64_t rows, int64_t stride,
                    int64_t begin, int64_t end, float* sums);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::ColumnDotsTable, column_dots)
