#pragma once

// int4: value = (code - 8) * scale + offset, scale and offset bf16, which has fp32's range; the product is
// exact, so that there is one rounding, with a fused multiply-add or without.
//
// The fit is HQQ's idea (Badri and Shaji, 2023), half-quadratic: the sum of the errors' p-th powers, p < 2,
// is minimised by turns, least squares for a target from which what is far off has been pulled back. Ours has
// p = 1, for which the pull is the error clamped to a threshold, and the least squares are by scale and
// offset both, with steps of twice their length. The threshold falls from half a step of the grid; of all
// pairs, as rounded, the one with the smallest sum of errors is kept. Mean squared and mean absolute error,
// as parts of NF4's, in blocks of 64: normal numbers 0.81 and 0.95, with one in 200 six times as large 0.83
// and 0.94.
//
// Every step rounds alike on all devices: products that could fuse with a sum are exact, in fp32 or in fp64,
// but for code times pull, which is kept apart; and sums are those of 16 lanes, folded in halves.

#include <cstdint>

#include "core/capability.h"
#include "core/host_device.h"

namespace shoestring::kernels {

constexpr int kInt4Lanes = 16;
constexpr int kInt4Steps = 8;            // 12 would take 0.4 % from the absolute error
constexpr float kInt4Decay = 1 / 1.25f;  // of the threshold, a step
constexpr float kInt4Shift =
    12582912.f;  // 1.5 * 2^23: a sum with it is rounded to an integer, in its lowest bits
constexpr float kInt4Smallest = 0x1p-126f;  // of a scale: its reciprocal is finite
constexpr float kLargestBf16 = 0x1.fep127f;

/// scale in the lower and offset in the upper half, bf16 each.
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

/// Over a block's elements: of codes (-8 to 7), of their squares, of pulls (the clamped errors) and of code
/// times pull.
struct Int4Sums {
  float codes, squares, pulls, products;
};

/// Of a block with an element that is not finite: all of it is NaN, of the same bits everywhere.
SHOESTRING_HOST_DEVICE Int4Fit nan_int4() {
  const uint32_t bits = 0x7fc00000u;
  Int4Fit fit{0, 0};
  __builtin_memcpy(&fit.offset, &bits, sizeof bits);
  return fit;
}

/// x as bf16 has it, ties to even; no overflow, and NaN stays NaN.
SHOESTRING_HOST_DEVICE float round_bf16(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  if (x == x) bits += 0x7fffu + (bits >> 16 & 1);
  bits &= 0xffff0000u;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x > kLargestBf16 ? kLargestBf16 : x < -kLargestBf16 ? -kLargestBf16 : x;
}

/// What eight steps may add to an offset, so that no code stands for an infinity.
SHOESTRING_HOST_DEVICE double room_int4(float offset) {
  return static_cast<double>(0x1.fffffep127f) - (offset < 0 ? -offset : offset);
}

/// 15.5 steps from a block's smallest element to its largest: from 15 the fit ends in worse places.
SHOESTRING_HOST_DEVICE Int4Fit first_int4(float low, float high) {
  const double bottom = low, top = high;
  const float offset = round_bf16(static_cast<float>((7 * bottom + 8 * top) / 15));
  const double up = (top - offset) / 7, down = (offset - bottom) / 8;
  const double reach = (up > down ? up : down) * (15 / 15.5), room = room_int4(offset) * (255. / 256 / 8);
  const float scale = round_bf16(static_cast<float>(reach < room ? reach : room));
  return {scale >= kInt4Smallest ? scale : 0, offset};
}

/// n elements later: least squares for values plus pulls, the step from what was taken twice, since pulls are
/// short.
SHOESTRING_HOST_DEVICE Int4Fit next_int4(const Int4Fit& fit, const Int4Sums& sums, int64_t n) {
  const double count = static_cast<double>(n), codes = sums.codes, pulls = sums.pulls;
  const double spread = count * sums.squares - codes * codes;
  const float wider = spread > 0 ? static_cast<float>((count * sums.products - codes * pulls) / spread) : 0;
  const float along = static_cast<float>((pulls - static_cast<double>(wider) * codes) / count);
  const Int4Fit next{round_bf16(fit.scale + 2 * wider), round_bf16(fit.offset + 2 * along)};
  const bool sound =
      next.scale >= kInt4Smallest && 8. * next.scale <= room_int4(next.offset);  // false for NaN
  return sound ? next : fit;
}

struct QuantizeInt4Table {
  // As Quantize4bitTable's, with scales for absmax.
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
