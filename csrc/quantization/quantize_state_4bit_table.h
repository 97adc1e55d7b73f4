#pragma once

#include <cstdint>

#include "core/capability.h"
#include "quantization/map_4bit.h"

namespace shoestring::kernels {

// Between n values and 4-bit state, which has whole blocks: the codes past the end are those of zeros.
struct QuantizeState4bitTable {
  void (*quantize)(const float* x, int64_t n, bool is_signed, Rounding4 rounding, uint8_t* codes,
                   float* scale);
  void (*dequantize)(const uint8_t* codes, const float* scale, int64_t n, bool is_signed, float* x);
};

// The same on the device. Each function returns an error's text or null; codes are aligned to 4 bytes.
struct QuantizeState4bitCuda {
  const char* (*quantize)(const float* x, int64_t n, bool is_signed, Rounding4 rounding, uint8_t* codes,
                          float* scale, void* stream);
  const char* (*dequantize)(const uint8_t* codes, const float* scale, int64_t n, bool is_signed, float* x,
                            void* stream);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::QuantizeState4bitTable, quantize_state_4bit)
