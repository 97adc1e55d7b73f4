#pragma once

#include <cstdint>

#include "quantization/quantize_4bit_table.h"

namespace shoestring::kernels {

// Launchers of the CUDA kernels that quantise and dequantise x (count) in one pass. On the CPU, the operator
// calls the kernels of quantisation and of dequantisation in turn, on pieces that stay in the L1 cache.
//
// All pointers but `book` are device pointers. book holds the values of "nf4" or "fp4" and is null for "int4"
// and "int8". For "int8", block_size is the length of a row. Each function returns an error text or null.
struct FakeQuantizeCuda {
  const char* (*fake_float)(const void* x, int64_t count, int64_t block_size, const Codebook* book, void* out,
                            void* stream);
  const char* (*fake_bf16)(const void* x, int64_t count, int64_t block_size, const Codebook* book, void* out,
                           void* stream);
  const char* (*fake_fp16)(const void* x, int64_t count, int64_t block_size, const Codebook* book, void* out,
                           void* stream);
};

}  // namespace shoestring::kernels
