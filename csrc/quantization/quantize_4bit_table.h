#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

// The 16 values of a 4-bit type, indexed by code. `midpoint` holds the midpoints between neighbouring values
// in ascending order. `order` holds the code of each value in ascending order of the values.
struct Codebook {
  float value[16];
  float midpoint[15];
  uint8_t order[16];
};

// A 4-bit quantised tensor in the form that the kernels read. The code of element i is in packed[i / 2], in
// the upper four bits if i is even. Its scale is that of block i / block_size. The scales are given in
// exactly one of three forms: absmax, or codes and nested, or offset. The pointers of the other two forms are
// null.
struct Packed {
  const uint8_t* packed;
  const float* absmax;   // (blocks), fp32 scales of "nf4" and "fp4"
  const uint8_t* codes;  // (blocks), 8-bit codes of double-quantised ("nested") scales
  // for nested scales: an offset, the 256 values by code, and one second-level scale per 256 blocks
  const float* nested;
  // (blocks), for "int4": a bf16 scale in the lower half and a bf16 offset in the upper half
  const uint32_t* offset;
  int64_t block_size;
  const Codebook* codebook;
};

struct Quantize4bitTable {
  // Quantises x (count) and writes its packed bytes and one scale per block. x is a whole tensor, or a part
  // of one that begins at a block.
  void (*quantize_float)(const float* x, int64_t count, int64_t block_size, const Codebook&, uint8_t* packed,
                         float* absmax);
  void (*quantize_bf16)(const uint16_t* x, int64_t count, int64_t block_size, const Codebook&,
                        uint8_t* packed, float* absmax);
  void (*quantize_fp16)(const uint16_t* x, int64_t count, int64_t block_size, const Codebook&,
                        uint8_t* packed, float* absmax);
};

struct Dequantize4bitTable {
  // Dequantises elements [begin, end) of the tensor into out[0 .. end - begin).
  void (*dequantize_float)(const Packed&, int64_t begin, int64_t end, float* out);
  void (*dequantize_bf16)(const Packed&, int64_t begin, int64_t end, uint16_t* out);
  void (*dequantize_fp16)(const Packed&, int64_t begin, int64_t end, uint16_t* out);
};

// Launchers of CUDA kernels. x, out and the pointers in Packed are device pointers; the code book is in host
// memory. stream is a cudaStream_t. Each function returns an error text or null.
struct Quantize4bitCuda {
  // Quantises the whole tensor x (count).
  const char* (*quantize_float)(const void* x, int64_t count, int64_t block_size, const Codebook&,
                                uint8_t* packed, float* absmax, void* stream);
  const char* (*quantize_bf16)(const void* x, int64_t count, int64_t block_size, const Codebook&,
                               uint8_t* packed, float* absmax, void* stream);
  const char* (*quantize_fp16)(const void* x, int64_t count, int64_t block_size, const Codebook&,
                               uint8_t* packed, float* absmax, void* stream);
};

struct Dequantize4bitCuda {
  // Dequantises elements [begin, begin + count) of the tensor into out[0 .. count). begin must be a multiple
  // of 8.
  const char* (*dequantize_float)(const Packed&, int64_t begin, int64_t count, void* out, void* stream);
  const char* (*dequantize_bf16)(const Packed&, int64_t begin, int64_t count, void* out, void* stream);
  const char* (*dequantize_fp16)(const Packed&, int64_t begin, int64_t count, void* out, void* stream);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::Quantize4bitTable, quantize_4bit)
SHOESTRING_CPU_TABLE(kernels::Dequantize4bitTable, dequantize_4bit)
