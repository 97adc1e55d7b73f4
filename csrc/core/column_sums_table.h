#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

/// Functions that add each column of a matrix to sums[column], in fp32. The matrix has `rows` contiguous rows
/// of `columns` elements.
struct ColumnSumsTable {
  void (*of_float)(const float* x, int64_t rows, int64_t columns, float* sums);
  void (*of_bf16)(const uint16_t* x, int64_t rows, int64_t columns, float* sums);
  void (*of_fp16)(const uint16_t* x, int64_t rows, int64_t columns, float* sums);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::ColumnSumsTable, column_sums)
