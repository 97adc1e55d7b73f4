#pragma once

// Stores tiles of the result of a matrix product that the tile functions do not store themselves.

#include "core/element_simd.h"
#include "gemm/gemm_table.h"
#include "gemm/panels_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

// Computes x (m, n) = alpha * sum + beta * c for one tile whose first element has the indices (row, column)
// in the result. The rows of `sum` are kColumns elements apart. Stores x in c or, if `narrow` is given,
// gain * x + offset rounded to 16 bits there.
SHOESTRING_INLINE void finish_tile(const float* sum, float* c, int64_t stride, int64_t m, int64_t n,
                                   float alpha, float beta, const kernels::GemmNarrow* narrow, int64_t row,
                                   int64_t column) {
  for (int64_t i = 0; i < m; ++i, sum += kColumns, c += stride) {
    F32 x[kWide];
    for (int k = 0; k < kWide; ++k) {
      x[k] = alpha * load(sum + k * kLanes);
      if (beta != 0) x[k] = fma(splat(beta), load_some<Float>(c + k * kLanes, n - k * kLanes), x[k]);
    }
    if (narrow == nullptr) {
      if (n == kColumns) {
        for (int k = 0; k < kWide; ++k) store(c + k * kLanes, x[k]);
      } else {
        float some[kColumns];
        for (int k = 0; k < kWide; ++k) store(some + k * kLanes, x[k]);
        __builtin_memcpy(c, some, n * sizeof(float));
      }
      continue;
    }
    for (int k = 0; k < kWide; ++k) {
      const int64_t at = column + k * kLanes;
      if (narrow->gain != nullptr) x[k] *= load_some<Float>(narrow->gain + at, n - k * kLanes);
      if (narrow->offset != nullptr) x[k] += load_some<Float>(narrow->offset + at, n - k * kLanes);
    }
    uint16_t some[kColumns], *to = narrow->data + (row + i) * narrow->stride + column,
                             *out = n == kColumns ? to : some;
    if (narrow->fp16) {
      Half::store(out, x[0], x[1]);
    } else {
      BFloat16::store(out, x[0], x[1]);
    }
    if (n != kColumns) __builtin_memcpy(to, some, n * sizeof(uint16_t));
  }
}

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
