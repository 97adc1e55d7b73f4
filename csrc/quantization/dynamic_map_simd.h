#pragma once

// Encodes and decodes block-wise 8-bit state (quantization/dynamic_map.h) without gathers. The segment comes
// from the bits of a float and its constants from a register; the rest is one multiply-add.

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
  // Prepares to decode the codes of a block with this scale.
#if defined(__AVX2__)
  explicit SHOESTRING_METHOD Decoder(float scale)
      : offset_(load_table8(dynamic_map<kSigned>().offset) * scale),
        slope_(load_table8(dynamic_map<kSigned>().slope) * scale) {}
#else
  explicit SHOESTRING_METHOD Decoder(float scale) : scale_(scale) {}
#endif

  // Decodes kLanes codes with a relative error of 1e-6. The scale is already part of the constants.
  SHOESTRING_METHOD F32 operator()(const uint8_t* codes) const {
    constexpr const DynamicMap& map = dynamic_map<kSigned>();
    F32 count = __builtin_convertvector(widen(codes), F32) + (kSigned ? -127.f : 1.f);
    F32 magnitude = kSigned ? abs(count) : count;
#if defined(__AVX2__)
    U32 segment = as_bits(kSigned ? magnitude + map.bias : magnitude) >> 23;
    F32 value = fma(magnitude, lookup(slope_, segment), lookup(offset_, segment));
#else
    // Without a fused multiply-add, arithmetic would give other last bits, so the values are looked up.
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

// Updates the largest magnitude, held as an integer: in the order of fp32 bits, NaN is above infinity and so
// is not lost. If x cannot be negative, a sign bit can only be that of a NaN.
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

// Constants that guess a magnitude's segment from the bits of its float, which are a piecewise linear
// logarithm. The guess is the segment or the one below it. A step of 0.95 decades and a start of -6.3 keep
// the guess within the exact limits of both maps.
constexpr double kBitsPerStep = 8388608 * 3.321928094887362 * 0.95;
constexpr float kGuessSlope = static_cast<float>(1 / kBitsPerStep);
// Adding 1.5 * 2^23 leaves the rounded guess in the low bits of the sum.
constexpr float kGuessOffset = static_cast<float>(12582912 + 6.3 / 0.95 + 0.5 - 127 * 8388608 / kBitsPerStep);
// Magnitudes up to kNegligible round like zero. NaN is replaced by kNegligible, so that every code is valid.
constexpr float kNegligible = 2e-7f;

template <bool kSigned>
struct Encoder {
  Table8 next = load_table8(dynamic_map<kSigned>().next);
  Table8 offset = load_table8(dynamic_map<kSigned>().inverse_offset);
  Table8 slope = load_table8(dynamic_map<kSigned>().inverse_slope);
  Table8 limit = load_table8(dynamic_map<kSigned>().limit);

  // Stores the codes of a block, kStateBlock elements of x: for each, the map's value nearest to x / scale.
  // scale is max |x|.
  SHOESTRING_METHOD void operator()(float* x, float scale, uint8_t* codes) const {
    // The reciprocal of a tiny scale would overflow. Multiplying by a power of two changes no code.
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
        // Only zero itself has code zero. Numbers whose bits are small enough to lower the code would have
        // code 1 anyway.
        I32 bits = (I32)as_bits(raw);
        code[j] = count < bits ? count : bits;
      }
    }
    store_bytes(codes, code[0], code[1], code[2], code[3], kSigned ? 127 : 0);
    if (__builtin_expect(any((nearest & 0xffffu) < 2 * kernels::kNear), 0)) settle(x, inverse, codes);
  }

  // Re-encodes a group in which some value is too close to the middle of two neighbours for arithmetic. The
  // exact middles decide.
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
