#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

// A compressed gradient is a sequence of records, one for each block of elements; the last block may be
// shorter, its record is not. A record is the fp32 scale of the block, and then its codes:
//
//     8 bits: 256 elements, a byte each: 128 + code
//     4 bits: 128 elements; byte i holds 8 + code of element i in its lower half, of element i + 64 above
//     1 bit:  256 elements; bit i of the codes, from the lowest on, is the sign bit of element i
//
// An element is code * scale, or with 1 bit, the scale with that sign. The scales of 8 and 4 bits have 16
// significant bits, so that these products are exact in fp32, and so is the residual.
template <int kBits>
struct GradientCodec;
template <>
struct GradientCodec<8> {
  static constexpr int kBlock = 256, kRecord = 4 + 256, kLevels = 127;
  static constexpr float kInverse = 7.874015718698502e-3f;  // 1 / kLevels
};
template <>
struct GradientCodec<4> {
  static constexpr int kBlock = 128, kRecord = 4 + 64, kLevels = 7;
  static constexpr float kInverse = 0.14285714924335480f;
};
template <>
struct GradientCodec<1> {
  static constexpr int kBlock = 256, kRecord = 4 + 32;
};

// A block with a sum of magnitudes (1 bit) or a largest magnitude of at least kHuge, or with NaN, has the
// scale NaN. A block of 8 or 4 bits with a largest magnitude below kTiny has the scale 0: its elements remain
// in the residual.
constexpr float kHugeGradient = 0x1p127f, kTinyGradient = 0x1p-100f;

/// Calls body(GradientCodec<bits>()) for `bits` of 8, 4 or 1.
template <class Body>
auto with_gradient_codec(int bits, Body body) {
  switch (bits) {
    case 8:
      return body(GradientCodec<8>());
    case 4:
      return body(GradientCodec<4>());
    default:
      return body(GradientCodec<1>());
  }
}

enum class GradientType { kFloat, kBFloat16, kHalf };

struct CompressGradientTable {
  // Adds gradient[0 .. n) to error, writes the records of the sums, and subtracts what the records stand for
  // from error. Blocks with the scale NaN leave zeros in error.
  void (*compress)(int bits, GradientType type, float* error, const void* gradient, int64_t n,
                   uint8_t* records);
  // Writes the mean of `ranks` compressed gradients of n elements to out. Their records begin `stride` bytes
  // apart.
  void (*decompress_mean)(int bits, GradientType type, const uint8_t* records, int64_t stride, int64_t ranks,
                          int64_t n, void* out);
};

// Launchers of CUDA kernels for the functions in CompressGradientTable. Each returns an error text or null.
struct CompressGradientCuda {
  const char* (*compress)(int bits, GradientType type, float* error, const void* gradient, int64_t n,
                          uint8_t* records, void* stream);
  const char* (*decompress_mean)(int bits, GradientType type, const uint8_t* records, int64_t stride,
                                 int64_t ranks, int64_t n, void* out, void* stream);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::CompressGradientTable, compress_gradient)
