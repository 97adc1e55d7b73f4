#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

// Reading side of an int8 tensor: element i is codes[i] * absmax[i / columns] / 127.
struct PackedInt8 {
  const int8_t* codes;
  const float* absmax;
  int64_t columns;
};

// bitsandbytes multiplies by this, as fp32 has it; so do we, for its bytes.
constexpr float kInverse127 = 7.874015718698502e-3f;

struct QuantizeInt8Table {
  // x (rows, columns), columns >= 1; writes rows of codes and their scales.
  void (*quantize_float)(const float* x, int64_t rows, int64_t columns, int8_t* codes, float* absmax);
  void (*quantize_bf16)(const uint16_t* x, int64_t rows, int64_t columns, int8_t* codes, float* absmax);
  void (*quantize_fp16)(const uint16_t* x, int64_t rows, int64_t columns, int8_t* codes, float* absmax);
};

struct DequantizeInt8Table {
  // Elements [begin, end) of the tensor to out[0 .. end - begin).
  void (*dequantize_float)(const PackedInt8&, int64_t begin, int64_t end, float* out);
  void (*dequantize_bf16)(const PackedInt8&, int64_t begin, int64_t end, uint16_t* out);
  void (*dequantize_fp16)(const PackedInt8&, int64_t begin, int64_t end, uint16_t* out);
};

// Pointers are on the device; stream is a cudaStream_t. They return an error's text or null.
struct QuantizeInt8Cuda {
  const char* (*quantize_float)(const void* x, int64_t rows, int64_t columns, int8_t* codes, float* absmax,
                                void* stream);
  const char* (*quantize_bf16)(const void* x, int64_t rows, int64_t columns, int8_t* codes, float* absmax,
                               void* stream);
  const char* (*quantize_fp16)(const void* x, int64_t rows, int64_t columns, int8_t* codes, float* absmax,
                               void* stream);
};

struct DequantizeInt8Cuda {
  // Elements [begin, begin + count) of the tensor, which are whole rows, to out[0 .. count).
  const char* (*dequantize_float)(const PackedInt8&, int64_t begin, int64_t count, void* out, void* stream);
  const char* (*dequantize_bf16)(const PackedInt8&, int64_t begin, int64_t count, void* out, void* stream);
  const char* (*dequantize_fp16)(const PackedInt8&, int64_t begin, int64_t count, void* out, void* stream);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::QuantizeInt8Table, quantize_int8)
SHOESTRING_CPU_TABLE(kernels::DequantizeInt8Table, dequantize_int8)
