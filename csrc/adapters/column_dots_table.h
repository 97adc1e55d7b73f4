#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

/// Functions that write the dot product of each column c of the matrices a and b, for begin <= c < end:
/// sums[c] = sum over rows r of a[r, c] * (b[r, c] - offset[c]). Both matrices have `rows` rows, which start
/// `stride` elements apart. A null pointer `offset` means zeros.
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
