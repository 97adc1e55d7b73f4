#pragma once

// The int4 format of weights: value = (code - 8) * scale + offset. scale and offset are bf16, which has
// fp32's range. The product is exact in fp32, so the value is rounded once, with a fused multiply-add or
// without.
//
// The fit of scale and offset follows HQQ (Badri and Shaji, 2023), a half-quadratic method that minimises the
// sum of the errors' p-th powers, p < 2. It alternates two steps: pull outliers back towards the grid, then
// solve least squares for scale and offset. This implementation has p = 1, for which the pull is the error
// clamped to a threshold. Least squares solves for scale and offset together, and the fit moves by twice the
// difference to the solution. The threshold starts at half a grid step and decreases. Of all pairs (scale,
// offset), rounded to bf16, the one with the smallest sum of errors is kept.
//
// For normally distributed numbers in blocks of 64 elements, the mean squared error is 0.81 times and the
// mean absolute error 0.95 times that of NF4. If one in 200 of these numbers is made six times as large, the
// two ratios are 0.83 and 0.94.
//
// Every operation rounds alike on all devices. The compiler may fuse a product with a sum only where the
// product is exact, in fp32 or fp64. The product of code and pull is not exact and is kept separate. All
// devices sum in 16 lanes and then add the upper half of the lanes to the lower half until one sum remains.

#include <cstdint>

#include "core/capability.h"
#include "core/host_device.h"

namespace shoestring::kernels {

constexpr int kInt4Lanes = 16;
constexpr int kInt4Steps = 8;  // number of fitting steps; 12 would reduce the absolute error by only 0.4 %
// factor by which each fitting step reduces the threshold of the pull
constexpr float kInt4Decay = 1 / 1.25f;
// 1.5 * 2^23. Adding it to a small number leaves the number, rounded to an integer, in the lowest bits of the
// sum.
constexpr float kInt4Shift = 12582912.f;
constexpr float kInt4Smallest = 0x1p-126f;  // the smallest scale with a finite reciprocal
constexpr float kLargestBf16 = 0x1.fep127f;

/// The parameters of an int4 block: a bf16 scale in the lower half and a bf16 offset in the upper half.
using Int4Scale = uint32_t;

struct Int4Fit {
  float scale, offset;

  SHOESTRING_HOST_DEVICE float inverse() const { return scale > 0 ? 1 / scale : 0; }
  SHOESTRING_HOST_DEVICE Int4Scale packed() const {
    uint32_t low, high;
    __builtin_memcpy(&low, &scale, sizeof low);
    __builtin_memcpy(&high, &offset, sizeof high);
    return low >> 16 | high;
  }
};

/// Sums over the elements of a block: the codes (-8 to 7), their squares, the pulls (clamped errors), and the
/// products of code and pull.
struct Int4Sums {
  float codes, squares, pulls, products;
};

/// Returns the scale and offset of a block with an infinite or NaN element. The whole block then dequantises
/// to NaN, with the same bits on every device.
SHOESTRING_HOST_DEVICE Int4Fit nan_int4() {
  const uint32_t bits = 0x7fc00000u;
  Int4Fit fit{0, 0};
  __builtin_memcpy(&fit.offset, &bits, sizeof bits);
  return fit;
}

/// Rounds x to bf16, ties to even. A finite x that would round to infinity becomes the largest bf16 number;
/// NaN stays NaN.
SHOESTRING_HOST_DEVICE float round_bf16(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  if (x == x) bits += 0x7fffu + (bits >> 16 & 1);
  bits &= 0xffff0000u;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x > kLargestBf16 ? kLargestBf16 : x < -kLargestBf16 ? -kLargestBf16 : x;
}

/// Returns the largest value of 8 * scale for which no dequantised value, up to eight grid steps from
/// `offset`, is infinite.
SHOESTRING_HOST_DEVICE double room_int4(float offset) {
  return static_cast<double>(0x1.fffffep127f) - (offset < 0 ? -offset : offset);
}

/// Returns the initial scale and offset of a block, from its smallest element `low` and its largest `high`.
/// The scale is chosen as if 15.5 grid steps lay between `low` and `high`. The 16 codes have only 15 steps,
/// but a scale for 15 steps gives worse fits.
SHOESTRING_HOST_DEVICE Int4Fit first_int4(float low, float high) {
  const double bottom = low, top = high;
  const float offset = round_bf16(static_cast<float>((7 * bottom + 8 * top) / 15));
  const double up = (top - offset) / 7, down = (offset - bottom) / 8;
  const double reach = (up > down ? up : down) * (15 / 15.5), room = room_int4(offset) * (255. / 256 / 8);
  const float scale = round_bf16(static_cast<float>(reach < room ? reach : room));
  return {scale >= kInt4Smallest ? scale : 0, offset};
}

/// Returns the next scale and offset of a block of n elements. Least squares fits them to the dequantised
/// values plus the pulls (the errors, clamped to a threshold). The fit moves by twice the difference to this
/// solution, because the clamping shortens the pulls.
SHOESTRING_HOST_DEVICE Int4Fit next_int4(const Int4Fit& fit, const Int4Sums& sums, int64_t n) {
  const double count = static_cast<double>(n), codes = sums.codes, pulls = sums.pulls;
  const double spread = count * sums.squares - codes * codes;
  const float wider = spread > 0 ? static_cast<float>((count * sums.products - codes * pulls) / spread) : 0;
  const float along = static_cast<float>((pulls - static_cast<double>(wider) * codes) / count);
  const Int4Fit next{round_bf16(fit.scale + 2 * wider), round_bf16(fit.offset + 2 * along)};
  // `sound` is false if the new scale is too small, if a dequantised value could be infinite, or if scale or
  // offset is NaN. Then the previous fit is kept.
  const bool sound = next.scale >= kInt4Smallest && 8. * next.scale <= room_int4(next.offset);
  return sound ? next : fit;
}

struct QuantizeInt4Table {
  // These functions quantise to int4. They have the arguments of the functions in Quantize4bitTable, but no
  // code book. Instead of absmax they write `scales`, a bf16 scale and offset per block.
  void (*quantize_float)(const float* x, int64_t count, int64_t block_size, uint8_t* packed,
                         Int4Scale* scales);
  void (*quantize_bf16)(const uint16_t* x, int64_t count, int64_t block_size, uint8_t* packed,
                        Int4Scale* scales);
  void (*quantize_fp16)(const uint16_t* x, int64_t count, int64_t block_size, uint8_t* packed,
                        Int4Scale* scales);
};

struct QuantizeInt4Cuda {
  const char* (*quantize_float)(const void* x, int64_t count, int64_t block_size, uint8_t* packed,
                                Int4Scale* scales, void* stream);
  const char* (*quantize_bf16)(const void* x, int64_t count, int64_t block_size, uint8_t* packed,
                               Int4Scale* scales, void* stream);
  const char* (*quantize_fp16)(const void* x, int64_t count, int64_t block_size, uint8_t* packed,
                               Int4Scale* scales, void* stream);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::QuantizeInt4Table, quantize_int4)
