#pragma once

#include <cstdint>

#include "core/capability.h"
#include "quantization/dynamic_map.h"

namespace shoestring::kernels {

// Converts n fp32 values to 8-bit codes and scales, or back. There is one scale per kStateBlock elements; the
// last block may be shorter.
struct Quantize8bitTable {
  void (*quantize)(const float* x, int64_t n, bool is_signed, uint8_t* codes, float* scale);
  void (*dequantize)(const uint8_t* codes, const float* scale, int64_t n, bool is_signed, float* x);
};

// Launchers of CUDA kernels for the functions in Quantize8bitTable. Each returns an error text or null.
struct Quantize8bitCuda {
  const char* (*quantize)(const float* x, int64_t n, bool is_signed, uint8_t* codes, float* scale,
                          void* stream);
  const char* (*dequantize)(const uint8_t* codes, const float* scale, int64_t n, bool is_signed, float* x,
                            void* stream);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::Quantize8bitTable, quantize_8bit)
