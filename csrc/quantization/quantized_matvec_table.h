#pragma once

#include <cstdint>

#include "core/capability.h"
#include "quantization/quantize_4bit_table.h"
#include "quantization/quantize_int8_table.h"

namespace shoestring::kernels {

/// The largest number of tokens in one call of multiply_4bit or multiply_int8.
constexpr int64_t kMatvecTokens = 4;

/// Computes y[t * stride + row] as the dot product of token x[t] and row `row` of a quantised weight (rows,
/// columns), for rows [first, last). The dequantised weight is not stored.
struct QuantizedMatvecTable {
  // columns is a multiple of the block size. In multiply_4bit, each token of x has its even elements first,
  // then its odd elements.
  void (*multiply_4bit)(const Packed&, int64_t first, int64_t last, int64_t columns, const float* x,
                        int64_t tokens, float* y, int64_t stride);
  void (*multiply_int8)(const PackedInt8&, int64_t first, int64_t last, int64_t columns, const float* x,
                        int64_t tokens, float* y, int64_t stride);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::QuantizedMatvecTable, quantized_matvec)
