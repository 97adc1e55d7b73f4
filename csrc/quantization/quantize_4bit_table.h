#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

// The 16 values of a 4-bit type by code, their midpoints in ascending order, and the code of each interval
// between the midpoints.
struct Codebook {
  float value[16];
  float midpoint[15];
  uint8_t order[16];
};

// Reading side of a quantised tensor. Element i has its code in packed[i / 2] (the even element in the upper
// four bits) and its scale in block i / block_size. One of three kinds of scales is there, and the others are
// null.
struct Packed {
  const uint8_t* packed;
  const float* absmax;   // (blocks); or, themselves quantised:
  const uint8_t* codes;  // (blocks), and
  const float* nested;   // offset, 256 values by code, one scale for 256 blocks; or, of int4:
  const uint32_t*
      offset;  // (blocks): a bf16 scale in the lower half and, in the upper, what is added to a scaled value
  int64_t block_size;
  const Codebook* codebook;
};

struct Quantize4bitTable {
  // x (count) is the part of a tensor that begins at a block; writes its own packed bytes and scales.
  void (*quantize_float)(const float* x, int64_t count, int64_t block_size, const Codebook&, uint8_t* packed,
                         float* absmax);
  void (*quantize_bf16)(const uint16_t* x, int64_t count, int64_t block_size, const Codebook&,
                        uint8_t* packed, float* absmax);
  void (*quantize_fp16)(const uint16_t* x, int64_t count, int64_t block_size, const Codebook&,
                        uint8_t* packed, float* absmax);
};

struct Dequantize4bitTable {
  // Elements [begin, end) of the tensor to out[0 .. end - begin).
  void (*dequantize_float)(const Packed&, int64_t begin, int64_t end, float* out);
  void (*dequantize_bf16)(const Packed&, int64_t begin, int64_t end, uint16_t* out);
  void (*dequantize_fp16)(const Packed&, int64_t begin, int64_t end, uint16_t* out);
};

// Pointers of x, out and Packed are on the device, the code book's is not; stream is a cudaStream_t. They
// return an error's text or null.
struct Quantize4bitCuda {
  // A whole tensor.
  const char* (*quantize_float)(const void* x, int64_t count, int64_t block_size, const Codebook&,
                                uint8_t* packed, float* absmax, void* stream);
  const char* (*quantize_bf16)(const void* x, int64_t count, int64_t block_size, const Codebook&,
                               uint8_t* packed, float* absmax, void* stream);
  const char* (*quantize_fp16)(const void* x, int64_t count, int64_t block_size, const Codebook&,
                               uint8_t* packed, float* absmax, void* stream);
};

struct Dequantize4bitCuda {
  // Elements [begin, begin + count) of the tensor to out[0 .. count); begin is a multiple of 8.
  const char* (*dequantize_float)(const Packed&, int64_t begin, int64_t count, void* out, void* stream);
  const char* (*dequantize_bf16)(const Packed&, int64_t begin, int64_t count, void* out, void* stream);
  const char* (*dequantize_fp16)(const Packed&, int64_t begin, int64_t count, void* out, void* stream);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::Quantize4bitTable, quantize_4bit)
SHOESTRING_CPU_TABLE(kernels::Dequantize4bitTable, dequantize_4bit)
