#pragma once

// int4 weights: value = (code - 8) * scale + offset, with scale and offset in bf16, which has fp32's range.
// The product is exact, so the value is rounded once, with a fused multiply-add or without.
//
// The fit follows HQQ (Badri and Shaji, 2023), a half-quadratic method that minimises the sum of the errors'
// p-th powers, p < 2. It alternates two steps: pull outliers back towards the grid, then solve least squares
// for the result. This implementation has p = 1, for which the pull is the error clamped to a threshold.
// Least squares solves for scale and offset together and takes twice the step. The threshold starts at half a
// grid step and decreases. Of all pairs (scale, offset), rounded to bf16, the one with the smallest sum of
// errors is kept.
//
// Mean squared and mean absolute error relative to NF4, blocks of 64: 0.81 and 0.95 for normal numbers, and
// 0.83 and 0.94 if one number in 200 is six times as large.
//
// Every operation rounds alike on all devices. Products that the compiler could fuse with a sum are exact, in
// fp32 or fp64; code times pull is not and is kept separate. All devices sum in 16 lanes that are then folded
// in halves.

#include <cstdint>

#include "core/capability.h"
#include "core/host_device.h"

namespace shoestring::kernels {

constexpr int kInt4Lanes = 16;
constexpr int kInt4Steps = 8;            // 12 steps would reduce the absolute error by only 0.4 %
constexpr float kInt4Decay = 1 / 1.25f;  // factor for the threshold, per step
// 1.5 * 2^23. Adding it rounds a number to an integer, which is in the lowest bits of the sum.
constexpr float kInt4Shift = 12582912.f;
constexpr float kInt4Smallest = 0x1p-126f;  // the smallest scale with a finite reciprocal
constexpr float kLargestBf16 = 0x1.fep127f;

/// A bf16 scale in the lower half and a bf16 offset in the upper half.
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

/// Sums over a block's elements: the codes (-8 to 7), their squares, the pulls (clamped errors) and code
/// times pull.
struct Int4Sums {
  float codes, squares, pulls, products;
};

/// Returns the fit of a block with an infinite or NaN element: the whole block becomes NaN, with the same
/// bits on every device.
SHOESTRING_HOST_DEVICE Int4Fit nan_int4() {
  const uint32_t bits = 0x7fc00000u;
  Int4Fit fit{0, 0};
  __builtin_memcpy(&fit.offset, &bits, sizeof bits);
  return fit;
}

/// Rounds x to bf16, ties to even. The result does not overflow, and NaN stays NaN.
SHOESTRING_HOST_DEVICE float round_bf16(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  if (x == x) bits += 0x7fffu + (bits >> 16 & 1);
  bits &= 0xffff0000u;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x > kLargestBf16 ? kLargestBf16 : x < -kLargestBf16 ? -kLargestBf16 : x;
}

/// Returns the largest number that eight steps may add to this offset without reaching infinity.
SHOESTRING_HOST_DEVICE double room_int4(float offset) {
  return static_cast<double>(0x1.fffffep127f) - (offset < 0 ? -offset : offset);
}

/// Returns the initial fit: 15.5 grid steps from a block's smallest element to its largest. Starting from 15
/// steps gives worse fits.
SHOESTRING_HOST_DEVICE Int4Fit first_int4(float low, float high) {
  const double bottom = low, top = high;
  const float offset = round_bf16(static_cast<float>((7 * bottom + 8 * top) / 15));
  const double up = (top - offset) / 7, down = (offset - bottom) / 8;
  const double reach = (up > down ? up : down) * (15 / 15.5), room = room_int4(offset) * (255. / 256 / 8);
  const float scale = round_bf16(static_cast<float>(reach < room ? reach : room));
  return {scale >= kInt4Smallest ? scale : 0, offset};
}

/// Returns the next fit of a block of n elements: least squares for values plus pulls. The step is doubled
/// because the pulls are short.
SHOESTRING_HOST_DEVICE Int4Fit next_int4(const Int4Fit& fit, const Int4Sums& sums, int64_t n) {
  const double count = static_cast<double>(n), codes = sums.codes, pulls = sums.pulls;
  const double spread = count * sums.squares - codes * codes;
  const float wider = spread > 0 ? static_cast<float>((count * sums.products - codes * pulls) / spread) : 0;
  const float along = static_cast<float>((pulls - static_cast<double>(wider) * codes) / count);
  const Int4Fit next{round_bf16(fit.scale + 2 * wider), round_bf16(fit.offset + 2 * along)};
  // `sound` is false if the new scale or offset is NaN.
  const bool sound = next.scale >= kInt4Smallest && 8. * next.scale <= room_int4(next.offset);
  return sound ? next : fit;
}

struct QuantizeInt4Table {
  // The functions are those of Quantize4bitTable, but they write `scales` instead of absmax.
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
