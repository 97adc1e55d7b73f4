#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

// An int8 tensor in the form that the kernels read: element i is codes[i] * absmax[i / columns] / 127.
struct PackedInt8 {
  const int8_t* codes;
  const float* absmax;
  int64_t columns;
};

// 1 / 127, as the fp32 constant that bitsandbytes uses, so that dequantised values agree with bitsandbytes.
constexpr float kInverse127 = 7.874015718698502e-3f;

struct QuantizeInt8Table {
  // Quantises x (rows, columns), columns >= 1, and writes the codes and one scale (absmax) per row.
  void (*quantize_float)(const float* x, int64_t rows, int64_t columns, int8_t* codes, float* absmax);
  void (*quantize_bf16)(const uint16_t* x, int64_t rows, int64_t columns, int8_t* codes, float* absmax);
  void (*quantize_fp16)(const uint16_t* x, int64_t rows, int64_t columns, int8_t* codes, float* absmax);
};

struct DequantizeInt8Table {
  // Dequantises elements [begin, end) of the tensor into out[0 .. end - begin).
  void (*dequantize_float)(const PackedInt8&, int64_t begin, int64_t end, float* out);
  void (*dequantize_bf16)(const PackedInt8&, int64_t begin, int64_t end, uint16_t* out);
  void (*dequantize_fp16)(const PackedInt8&, int64_t begin, int64_t end, uint16_t* out);
};

// Launchers of CUDA kernels. All pointers are device pointers, and stream is a cudaStream_t. Each function
// returns an error text or null.
struct QuantizeInt8Cuda {
  const char* (*quantize_float)(const void* x, int64_t rows, int64_t columns, int8_t* codes, float* absmax,
                                void* stream);
  const char* (*quantize_bf16)(const void* x, int64_t rows, int64_t columns, int8_t* codes, float* absmax,
                               void* stream);
  const char* (*quantize_fp16)(const void* x, int64_t rows, int64_t columns, int8_t* codes, float* absmax,
                               void* stream);
};

struct DequantizeInt8Cuda {
  // Dequantises elements [begin, begin + count) of the tensor, which must be whole rows, into out[0 ..
  // count).
  const char* (*dequantize_float)(const PackedInt8&, int64_t begin, int64_t count, void* out, void* stream);
  const char* (*dequantize_bf16)(const PackedInt8&, int64_t begin, int64_t count, void* out, void* stream);
  const char* (*dequantize_fp16)(const PackedInt8&, int64_t begin, int64_t count, void* out, void* stream);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::QuantizeInt8Table, quantize_int8)
SHOESTRING_CPU_TABLE(kernels::DequantizeInt8Table, dequantize_int8)
