#pragma once

// Encodes and decodes 4-bit optimizer state (quantization/map_4bit.h). A table of 16 values fits one or two
// registers, so decoding is a register permutation. Encoding is arithmetic on the bits of floats. Each
// operation rounds alike everywhere, so every CPU capability and the GPU produce the same codes.

#include "core/vec_simd.h"
#include "quantization/map_4bit.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

using kernels::kGroup4;
using kernels::kScales4;
using kernels::kStateBlock;
using kernels::Rounding4;

template <bool kSigned>
SHOESTRING_INLINE constexpr const float* map4() {
  return kSigned ? kernels::kSignedMap4.value : kernels::kUnsignedMap4.value;
}

template <bool kSigned>
class Decoder4 {
 public:
  // Prepares to decode the codes and scales of one block.
  SHOESTRING_METHOD Decoder4(const uint8_t* codes, const float* scales) : codes_(codes), scales_(scales) {}

  // Returns the values of elements i to i + kLanes - 1 of the block, where i is a multiple of kLanes.
  SHOESTRING_METHOD F32 operator()(int64_t i) const {
    uint32_t words[kLanes / 8 + 1] = {};  // each word holds the codes of eight elements
    __builtin_memcpy(words, codes_ + i / 2, kLanes / 2);
#if defined(__AVX512F__)
    U32 nibble = (U32)_mm512_mask_set1_epi32(_mm512_set1_epi32(words[0]), 0xff00, words[1]) >> shifts();
    F32 value = _mm512_permutexvar_ps((__m512i)nibble, low_);
#elif defined(__AVX2__)
    U32 nibble = (U32{} + words[0]) >> shifts();
    F32 value = _mm256_blendv_ps(_mm256_permutevar8x32_ps(low_, (__m256i)nibble),
                                 _mm256_permutevar8x32_ps(high_, (__m256i)nibble), (__m256)(nibble << 28));
#else
    F32 value;
    for (int lane = 0; lane < kLanes; ++lane)
      value[lane] = map4<kSigned>()[words[lane / 8] >> lane % 8 * 4 & 15];
#endif
    return value * scales_[i / kGroup4<kSigned>];
  }

 private:
#if defined(__AVX2__)
  static SHOESTRING_METHOD U32 shifts() {
    U32 s;
    for (int lane = 0; lane < kLanes; ++lane) s[lane] = lane % 8 * 4;
    return s;
  }
  F32 low_ = load(map4<kSigned>());
#if !defined(__AVX512F__)
  F32 high_ = load(map4<kSigned>() + 8);
#endif
#endif
  const uint8_t* codes_;
  const float* scales_;
};

// Multiplies the low 16 bits of each 32-bit lane of a, as a signed number, by b.
SHOESTRING_INLINE I32 times_low(I32 a, int16_t b) {
#if defined(__AVX512F__)
  return (I32)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi32(b));
#elif defined(__AVX2__)
  return (I32)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi32(b));
#else
  return (a << 16 >> 16) * b;
#endif
}

// Rounds x to the nearest integer, ties to even, for |x| < 2^22.
SHOESTRING_INLINE I32 round_to_int(F32 x) {
#if defined(__AVX512F__)
  return (I32)_mm512_cvtps_epi32(x);
#elif defined(__AVX2__)
  return (I32)_mm256_cvtps_epi32(x);
#else
  // adding 1.5 * 2^23 leaves the rounded integer in the low bits of the sum
  return (I32)as_bits(x + 12582912.f) - 0x4b400000;
#endif
}

// Stores the low four bits of each lane of a, b, c and d, in this order, two lanes per byte.
SHOESTRING_INLINE void store_nibbles(uint8_t* p, I32 a, I32 b, I32 c, I32 d) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  // The AVX2 pack instructions work within 128-bit halves, so interleaving the halves restores the order of
  // the byte pairs.
  __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32((__m256i)a, (__m256i)b),
                                     _mm256_packs_epi32((__m256i)c, (__m256i)d));
  bytes = _mm256_and_si256(bytes, _mm256_set1_epi8(15));
  __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001));  // first code + 16 * second code
  pairs = _mm256_packus_epi16(pairs, pairs);
  __m128i out = _mm_unpacklo_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), out);
#else
  const I32 v[4] = {a & 15, b & 15, c & 15, d & 15};
  for (int i = 0; i < 4; ++i) {
#if defined(__AVX512F__)
    __m512i pairs = _mm512_or_si512((__m512i)v[i], _mm512_srli_epi64((__m512i)v[i], 28));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p + i * kLanes / 2), _mm512_cvtepi64_epi8(pairs));
#else
    for (int lane = 0; lane < kLanes; lane += 2) {
      p[(i * kLanes + lane) / 2] = static_cast<uint8_t>(v[i][lane] | v[i][lane + 1] << 4);
    }
#endif
  }
#endif
}

// The encoder finds the largest magnitude of each part of 32 elements. A group, whose elements share a scale,
// has one part (signed) or four (unsigned).
constexpr int kParts4 = 8;
constexpr int64_t kPart4 = kStateBlock / kParts4;

// Writes the largest lane of each vector v[i] to out[i].
SHOESTRING_INLINE void maxima(const U32 (&v)[kParts4], uint32_t (&out)[kParts4]) {
#if defined(__AVX2__)
  __m256i x[kParts4];
  for (int i = 0; i < kParts4; ++i) {
#if defined(__AVX512F__)
    x[i] =
        _mm256_max_epu32(_mm512_castsi512_si256((__m512i)v[i]), _mm512_extracti64x4_epi64((__m512i)v[i], 1));
#else
    x[i] = (__m256i)v[i];
#endif
  }
  for (int i = 0; i < kParts4; i += 2) {  // transposes the vectors and takes maxima at the same time
    x[i / 2] = _mm256_max_epu32(_mm256_unpacklo_epi32(x[i], x[i + 1]), _mm256_unpackhi_epi32(x[i], x[i + 1]));
  }
  for (int i = 0; i < kParts4 / 2; i += 2) {
    x[i / 2] = _mm256_max_epu32(_mm256_unpacklo_epi64(x[i], x[i + 1]), _mm256_unpackhi_epi64(x[i], x[i + 1]));
  }
  __m256i top = _mm256_max_epu32(_mm256_permute2x128_si256(x[0], x[1], 0x20),
                                 _mm256_permute2x128_si256(x[0], x[1], 0x31));
  __builtin_memcpy(out, &top, sizeof out);
#else
  for (int i = 0; i < kParts4; ++i) {
    out[i] = 0;
    for (int lane = 0; lane < kLanes; ++lane) out[i] = v[i][lane] > out[i] ? v[i][lane] : out[i];
  }
#endif
}

template <bool kSigned>
class Encoder4 {
 public:
  explicit SHOESTRING_METHOD Encoder4(Rounding4 rounding) : rounding_(rounding) {}

  // Stores the scales and codes of a block, the kStateBlock elements of x. The scale of a group with a NaN is
  // NaN, and the scale of a group with an infinity is infinite.
  SHOESTRING_METHOD void operator()(const float* x, float* scales, uint8_t* codes) const {
    float inverse[kParts4], raised[kStateBlock];
    if (__builtin_expect(find_scales(x, scales, inverse), 0)) {
      raise(x, scales, inverse, raised);
      x = raised;
    }
    if (rounding_.dithered) {
      encode<true>(x, inverse, codes);
    } else {
      encode<false>(x, inverse, codes);
    }
  }

 private:
  static constexpr int kPartsInScale = kParts4 / kScales4<kSigned>;

  // Computes the scales of the groups and their reciprocals. Returns true if a reciprocal may have
  // overflowed.
  static SHOESTRING_METHOD bool find_scales(const float* x, float* scales, float (&inverse)[kParts4]) {
    U32 part[kParts4];
    for (int k = 0; k < kParts4; ++k) {
      I32 positive{};
      U32 any{};
#pragma GCC unroll 8
      for (int64_t i = 0; i < kPart4; i += kLanes) {
        U32 bits = as_bits(load(x + k * kPart4 + i));
        // Compared as signed integers, the bits of a positive NaN are above those of infinity. Compared as
        // unsigned integers, the bits of negative numbers are above all others.
        if constexpr (kSigned) {
          positive = (I32)bits > positive ? (I32)bits : positive;
          any = bits > any ? bits : any;
        } else {
          bits &= 0x7fffffffu;
          positive = (I32)bits > positive ? (I32)bits : positive;
        }
      }
      // part[k] holds the bits of the largest magnitude, without the sign. For signed values they are shifted
      // left, and the lowest bit is the sign.
      part[k] = (U32)positive;
      if constexpr (kSigned) {
        U32 rotated = (any << 1) | (any >> 31);
        part[k] <<= 1;
        part[k] = rotated > part[k] ? rotated : part[k];
      }
    }
    uint32_t top[kParts4], bits[kParts4], tiny = 0;
    maxima(part, top);
    if constexpr (!kSigned) {
      for (int stride = 1; stride < kPartsInScale; stride *= 2) {
        uint32_t other[kParts4];
        for (int k = 0; k < kParts4; ++k) other[k] = top[k ^ stride];
        for (int k = 0; k < kParts4; ++k) top[k] = other[k] > top[k] ? other[k] : top[k];
      }
    }
    for (int k = 0; k < kParts4; ++k) {
      // The scale of a signed group has the opposite sign of the element with the largest magnitude. This
      // element is then -1 in units of the scale.
      bits[k] = !kSigned ? top[k] : top[k] != 0 ? (top[k] >> 1) | (~top[k] << 31) : 0;
    }
    float all[kParts4];
    __builtin_memcpy(all, bits, sizeof all);
    for (int k = 0; k < kParts4; ++k) inverse[k] = all[k] != 0 ? 1 / all[k] : 0;
    for (int k = 0; k < kParts4; ++k) tiny |= __builtin_fabsf(all[k]) < kernels::kTinyScale4 && all[k] != 0;
    for (int k = 0; k < kParts4; k += kPartsInScale) scales[k / kPartsInScale] = all[k];
    return tiny != 0;
  }

  static __attribute__((noinline)) void raise(const float* x, const float* scales, float (&inverse)[kParts4],
                                              float* raised) {
    for (int k = 0; k < kParts4; ++k) {
      const float scale = scales[k / kPartsInScale];
      const bool tiny = __builtin_fabsf(scale) < kernels::kTinyScale4 && scale != 0;
      const float factor = tiny ? kernels::kRaise4 : 1;
      if (tiny) inverse[k] = 1 / (scale * factor);
      for (int64_t i = k * kPart4; i < (k + 1) * kPart4; ++i) raised[i] = x[i] * factor;
    }
  }

  template <bool kDithered>
  SHOESTRING_METHOD void encode(const float* x, const float (&inverse)[kParts4], uint8_t* codes) const {
    I32 dither{};
    for (int lane = 0; lane < kLanes; ++lane) dither[lane] = rounding_.phase + lane * kernels::kDitherStride;
    for (int64_t i = 0; i < kStateBlock; i += 4 * kLanes) {
      I32 code[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const int64_t at = i + j * kLanes;
        code[j] = encode_one<kDithered>(load(x + at) * inverse[at / kPart4], dither);
        if constexpr (kDithered) dither += static_cast<int32_t>(kLanes * kernels::kDitherStride);
      }
      store_nibbles(codes + i / 2, code[0], code[1], code[2], code[3]);
    }
  }

  template <bool kDithered>
  static SHOESTRING_METHOD I32 encode_one(F32 x, I32 dither) {
    if constexpr (kSigned) {
      x = min(x, splat(kernels::kTop4Signed));  // min() also turns NaN into kTop4Signed
      I32 steps = (I32)as_bits(abs(x) + kernels::kBias4) + kernels::offset4_signed(kDithered);
      if constexpr (kDithered) steps += times_low(dither, kernels::kDither4Signed);
      F32 magnitude = __builtin_convertvector(steps, F32) * kernels::kInverseStep4Signed;
      if constexpr (kDithered) magnitude = max(magnitude, F32{});
      return copy_sign(round_to_int(magnitude), x);
    } else {
      // max() turns NaN into zero
      I32 steps = kernels::offset4_unsigned(kDithered) - (I32)as_bits(max(x, F32{}));
      if constexpr (kDithered) steps += times_low(dither, kernels::kDither4Unsigned);
      return round_to_int(
          min(__builtin_convertvector(steps, F32) * kernels::kInverseStep4Unsigned, splat(15)));
    }
  }

  Rounding4 rounding_;
};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
