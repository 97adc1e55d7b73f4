#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

/// CPU kernels, one per dtype. Each returns the sum of squares of `count` elements. The additions are in
/// fp32, so `count` must be at most kNormChunk.
struct ForeachNormTable {
  double (*squares_float)(const void* x, int64_t count);
  double (*squares_bf16)(const void* x, int64_t count);
  double (*squares_fp16)(const void* x, int64_t count);
};

constexpr int64_t kNormChunk = int64_t{1} << 13;

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::ForeachNormTable, foreach_norm)
