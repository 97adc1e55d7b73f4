#pragma once

#include <cstdint>

#include "core/capability.h"
#include "quantization/dynamic_map.h"

namespace shoestring::kernels {

// Between values and 8-bit state; n may be anything, and codes have n elements.
struct Quantize8bitTable {
  void (*quantize)(const float* x, int64_t n, bool is_signed, uint8_t* codes, float* scale);
  void (*dequantize)(const uint8_t* codes, const float* scale, int64_t n, bool is_signed, float* x);
};

// The same on the device. Each function returns an error's text or null.
struct Quantize8bitCuda {
  const char* (*quantize)(const float* x, int64_t n, bool is_signed, uint8_t* codes, float* scale,
                          void* stream);
  const char* (*dequantize)(const uint8_t* codes, const float* scale, int64_t n, bool is_signed, float* x,
                            void* stream);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::Quantize8bitTable, quantize_8bit)
