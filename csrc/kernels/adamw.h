#pragma once

#include <cstdint>

#include "kernels/adamw_rule.h"
#include "kernels/capability.h"
#include "kernels/dynamic_map.h"

namespace shoestring::kernels {

enum class WeightType { kFloat, kBFloat16, kHalf };

// One tensor of `count` elements and its state. A tensor is worked on in blocks of kStateBlock elements.
struct AdamWTensor {
  AdamWRule rule;
  WeightType type;
  void* param;
  const void* grad;
  void* exp_avg;            // uint8 codes where there are scales, else fp32
  void* exp_avg_sq;
  float* exp_avg_scale;     // one a block, or null
  float* exp_avg_sq_scale;
  int64_t count;
};

struct AdamWTable {
  // One step of blocks [first, last). The state has room for whole blocks; param and grad end at `count`.
  void (*step)(const AdamWTensor& tensor, int64_t first, int64_t last);

  // Between values and 8-bit state; n may be anything, and codes have n elements.
  void (*quantize)(const float* x, int64_t n, bool is_signed, uint8_t* codes, float* scale);
  void (*dequantize)(const uint8_t* codes, const float* scale, int64_t n, bool is_signed, float* x);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::AdamWTable, adamw)
