#pragma once

// Encodes and decodes block-wise 8-bit optimizer state (quantization/dynamic_map.h) without gather
// instructions. The values of the map form segments, one per decade. The bits of a float give the segment of
// a magnitude, and a register shuffle gives the constants of the segment. One multiply-add computes the code
// or the value.

#include "core/vec_simd.h"
#include "quantization/dynamic_map.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

using kernels::DynamicMap;
using kernels::kStateBlock;

template <bool kSigned>
SHOESTRING_INLINE constexpr const DynamicMap& dynamic_map() {
  return kSigned ? kernels::kSignedMap : kernels::kUnsignedMap;
}

template <bool kSigned>
class Decoder {
 public:
  // Prepares to decode the codes of a block that has the quantisation scale `scale`.
#if defined(__AVX2__)
  explicit SHOESTRING_METHOD Decoder(float scale)
      : offset_(load_table8(dynamic_map<kSigned>().offset) * scale),
        slope_(load_table8(dynamic_map<kSigned>().slope) * scale) {}
#else
  explicit SHOESTRING_METHOD Decoder(float scale) : scale_(scale) {}
#endif

  // Decodes kLanes codes with a relative error of 1e-6. On AVX2 and AVX-512 the table entries already contain
  // the scale as a factor.
  SHOESTRING_METHOD F32 operator()(const uint8_t* codes) const {
    constexpr const DynamicMap& map = dynamic_map<kSigned>();
    F32 count = __builtin_convertvector(widen(codes), F32) + (kSigned ? -127.f : 1.f);
    F32 magnitude = kSigned ? abs(count) : count;
#if defined(__AVX2__)
    U32 segment = as_bits(kSigned ? magnitude + map.bias : magnitude) >> 23;
    F32 value = fma(magnitude, lookup(slope_, segment), lookup(offset_, segment));
#else
    // The last bits of a fused multiply-add differ from those of a multiplication and an addition. Without
    // AVX2 the values are therefore looked up.
    F32 value;
    for (int i = 0; i < kLanes; ++i) value[i] = map.value[static_cast<int>(magnitude[i])];
    value *= scale_;
#endif
    return kSigned ? as_float(as_bits(value) | (as_bits(count) & 0x80000000u)) : value;
  }

 private:
#if defined(__AVX2__)
  Table8 offset_, slope_;
#else
  float scale_;
#endif
};

// Updates `most`, the largest magnitude in each lane, whose fp32 bits are compared as integers. As an integer
// NaN is larger than infinity, so a NaN is kept. If kSigned is false, x is not negative, so only a NaN can
// have a sign bit.
template <bool kSigned>
SHOESTRING_INLINE U32 larger(U32 most, F32 x) {
  U32 bits = as_bits(kSigned ? abs(x) : x);
  return bits > most ? bits : most;
}
SHOESTRING_INLINE float largest(U32 most) {
  uint32_t lanes[kLanes], top = 0;
  __builtin_memcpy(lanes, &most, sizeof most);
  for (int i = 0; i < kLanes; ++i) top = lanes[i] > top ? lanes[i] : top;
  top &= 0x7fffffffu;
  float x;
  __builtin_memcpy(&x, &top, sizeof x);
  return x;
}

// Constants for guessing the segment (the decade of the map) of a magnitude from the bits of its float. Read
// as an integer, the bits are a piecewise linear logarithm. The guess is the right segment or the one below
// it. With steps of 0.95 decades that start at 10^-6.3, this holds for both maps, signed and unsigned.
constexpr double kBitsPerStep = 8388608 * 3.321928094887362 * 0.95;
constexpr float kGuessSlope = static_cast<float>(1 / kBitsPerStep);
// Adding 1.5 * 2^23 to a guess leaves the guess, rounded to an integer, in the low bits of the sum.
constexpr float kGuessOffset = static_cast<float>(12582912 + 6.3 / 0.95 + 0.5 - 127 * 8388608 / kBitsPerStep);
// Magnitudes up to kNegligible have the same code as zero. NaN is replaced by kNegligible, so that every code
// is valid.
constexpr float kNegligible = 2e-7f;

template <bool kSigned>
struct Encoder {
  Table8 next = load_table8(dynamic_map<kSigned>().next);
  Table8 offset = load_table8(dynamic_map<kSigned>().inverse_offset);
  Table8 slope = load_table8(dynamic_map<kSigned>().inverse_slope);
  Table8 limit = load_table8(dynamic_map<kSigned>().limit);

  // Stores the codes of a block, the kStateBlock elements of x. A code is that of the map's value nearest to
  // x / scale, where scale is max |x|.
  SHOESTRING_METHOD void operator()(float* x, float scale, uint8_t* codes) const {
    // The reciprocal of a tiny scale would overflow, so x and scale are multiplied by a power of two. This
    // changes no code.
    if (scale > 0 && scale < 0x1p-100f) {
      for (int64_t i = 0; i < kStateBlock; i += kLanes) store(x + i, load(x + i) * 0x1p100f);
      scale *= 0x1p100f;
    }
    const float inverse = scale > 0 ? 1 / scale : 0;
    for (int64_t i = 0; i < kStateBlock; i += 4 * kLanes) group(x + i, inverse, codes + i);
  }

 private:
  SHOESTRING_METHOD void group(const float* x, float inverse, uint8_t* codes) const {
    constexpr const DynamicMap& map = dynamic_map<kSigned>();
    I32 code[4];
    U32 nearest = U32{} + 0xffffu;
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      F32 raw = load(x + j * kLanes), scaled = raw * inverse;
      F32 magnitude = max(kSigned ? abs(scaled) : scaled, splat(kNegligible));
      F32 guess =
          fma(__builtin_convertvector((I32)as_bits(magnitude), F32), splat(kGuessSlope), splat(kGuessOffset));
      U32 segment = as_bits(guess);
      segment = (U32)add_where_greater((I32)segment, magnitude, lookup(next, segment));
      F32 position =
          min(fma(magnitude, lookup(slope, segment), lookup(offset, segment)), lookup(limit, segment));
      I32 fixed = __builtin_convertvector(position, I32);
      nearest = min_halves(nearest, (U32)fixed);
      I32 count = add_where_greater(fixed >> 16, scaled, splat(map.middle[map.highest - 1]));
      if constexpr (kSigned) {
        code[j] = copy_sign(count, scaled);
      } else {
        // Only zero itself has code 0. Here `count`, the code of x by rounding, is at least 1. min(count,
        // bits of x) is 0 for zero only, and does not change the codes of other numbers: the bits of a number
        // are below 256 only if its code is 1.
        I32 bits = (I32)as_bits(raw);
        code[j] = count < bits ? count : bits;
      }
    }
    store_bytes(codes, code[0], code[1], code[2], code[3], kSigned ? 127 : 0);
    if (__builtin_expect(any((nearest & 0xffffu) < 2 * kernels::kNear), 0)) settle(x, inverse, codes);
  }

  // Computes the codes of a group of 4 * kLanes elements again, by comparing elements with the exact middles
  // between neighbouring values. It is called if some element is so close to a middle that the rounding of
  // multiply-add arithmetic may give the wrong code.
  static __attribute__((noinline)) void settle(const float* x, float inverse, uint8_t* codes) {
    constexpr const DynamicMap& map = dynamic_map<kSigned>();
    for (int i = 0; i < 4 * kLanes; ++i) {
      const float scaled = x[i] * inverse;
      const bool negative = kSigned && scaled < 0;
      const float magnitude = negative ? -scaled : scaled;
      int count = kSigned ? codes[i] - 127 : codes[i] + 1;
      if (negative) count = -count;
      while (count < map.highest - (negative ? 1 : 0) && magnitude > map.middle[count]) ++count;
      while (count > map.lowest + (kSigned ? 0 : 1) && !(magnitude > map.middle[count - 1])) --count;
      if (!kSigned && x[i] == 0) count = map.lowest;
      codes[i] = static_cast<uint8_t>(kSigned ? (negative ? 127 - count : 127 + count) : count - 1);
    }
  }
};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
