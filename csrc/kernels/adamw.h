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

// CUDA: a parameter as the kernel finds it. Without a gradient it is left alone, and has no blocks of the launch.
constexpr uint64_t kNoGradient = 3;  // in place of a type
struct AdamWEntry {
  void* param;
  const void* grad;
  uint64_t count : 62, type : 2;  // a WeightType
  uint32_t block;                 // of the arena, at which its state begins; 2^32 blocks are 2 TiB of 8-bit state
  uint32_t end;                   // in the blocks of a launch; the launcher's
};

struct AdamWState {
  void* exp_avg;  // uint8 codes where there are scales, else fp32; multiples of 16 bytes
  void* exp_avg_sq;
  float* exp_avg_scale;
  float* exp_avg_sq_scale;
};

// Pointers are on the device, but for `entries`. Each function returns an error's text or null.
struct AdamWCuda {
  // One step of all entries, whose `steps` advance. `rules` is room for one a parameter.
  const char* (*step)(const AdamWEntry* entries, int64_t count, const AdamWOptions&, const AdamWState&, float* steps,
                      AdamWRule* rules, void* stream);
};
struct Quantize8bitCuda {
  const char* (*quantize)(const float* x, int64_t n, bool is_signed, uint8_t* codes, float* scale, void* stream);
  const char* (*dequantize)(const uint8_t* codes, const float* scale, int64_t n, bool is_signed, float* x,
                            void* stream);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::AdamWTable, adamw)
