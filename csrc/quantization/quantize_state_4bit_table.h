#pragma once

#include <cstdint>

#include "core/capability.h"
#include "quantization/map_4bit.h"

namespace shoestring::kernels {

// Converts n fp32 values to 4-bit optimizer state, or back. The state consists of whole blocks; beyond
// element n it holds the codes of zeros.
struct QuantizeState4bitTable {
  void (*quantize)(const float* x, int64_t n, bool is_signed, Rounding4 rounding, uint8_t* codes,
                   float* scale);
  void (*dequantize)(const uint8_t* codes, const float* scale, int64_t n, bool is_signed, float* x);
};

// Launchers of CUDA kernels for the functions in QuantizeState4bitTable. Each returns an error text or null.
// The pointer `codes` must be aligned to 4 bytes.
struct QuantizeState4bitCuda {
  const char* (*quantize)(const float* x, int64_t n, bool is_signed, Rounding4 rounding, uint8_t* codes,
                          float* scale, void* stream);
  const char* (*dequantize)(const uint8_t* codes, const float* scale, int64_t n, bool is_signed, float* x,
                            void* stream);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::QuantizeState4bitTable, quantize_state_4bit)
