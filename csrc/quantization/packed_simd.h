#pragma once

// Helper functions that the CPU kernels for quantised tensors share.

#include "core/vec_simd.h"
#include "quantization/quantize_4bit_table.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

// Returns the scale of a block. A nested scale is a product plus an offset. The product is rounded before the
// sum, as in bitsandbytes, so the compiler must not fuse the two operations.
SHOESTRING_INLINE float scale_of(const kernels::Packed& p, int64_t block) {
  if (p.absmax != nullptr) return p.absmax[block];
  float product = p.nested[1 + p.codes[block]] * p.nested[257 + (block >> 8)];
#if defined(__GNUC__) && !defined(__clang__)
  product = __builtin_assoc_barrier(product);
#else
  volatile float rounded = product;
  product = rounded;
#endif
  return product + p.nested[0];
}

// Computes the values of all 16 codes for a block. With int4 the products are exact, so a fused multiply-add
// gives the same values as two operations.
constexpr int kTableParts = 16 / kLanes;
SHOESTRING_INLINE void scaled_values(const kernels::Packed& p, const F32 (&code)[kTableParts], int64_t block,
                                     F32 (&values)[kTableParts]) {
  if (p.offset != nullptr) {
    const U32 both = U32{} + p.offset[block];
    const F32 scale = as_float(both << 16), offset = as_float(both & 0xffff0000u);
    for (int k = 0; k < kTableParts; ++k) values[k] = fma(code[k], scale, offset);
    return;
  }
  const F32 scale = splat(scale_of(p, block));
  for (int k = 0; k < kTableParts; ++k) values[k] = code[k] * scale;
}

// Converts kLanes int8 codes to fp32.
SHOESTRING_INLINE F32 to_float(const int8_t* codes) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))));
#else
  typedef int8_t S8 __attribute__((vector_size(kLanes)));
  return __builtin_convertvector(load_as<S8>(codes), F32);
#endif
}

// Convert n numbers to fp32: widen() copies fp32 numbers, and widen16() converts bf16 or fp16.
SHOESTRING_INLINE void widen(const float* from, int64_t n, float* to) {
  __builtin_memcpy(to, from, n * sizeof(float));
}
template <F32 (*Convert)(U16)>
SHOESTRING_INLINE void widen16(const uint16_t* from, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, Convert(load_as<U16>(from + i)));
  if (i < n) {
    U16 rest{};
    __builtin_memcpy(&rest, from + i, (n - i) * sizeof(uint16_t));
    store(to + i, Convert(rest), n - i);
  }
}
SHOESTRING_INLINE F32 convert_bf16(U16 x) { return from_bf16(x); }
SHOESTRING_INLINE F32 convert_fp16(U16 x) { return from_fp16(x); }

// Returns the largest magnitude of x, or NaN if x contains one. The bits of magnitudes are compared as
// integers, where NaN is the largest. n is a multiple of 16.
SHOESTRING_INLINE float largest_magnitude(const float* x, int64_t n) {
  I32 best{};
  for (int64_t i = 0; i < n; i += kLanes) {
    I32 bits = (I32)(as_bits(load(x + i)) & 0x7fffffffu);
    best = bits > best ? bits : best;
  }
  int32_t top = 0;
  for (int i = 0; i < kLanes; ++i) top = best[i] > top ? best[i] : top;
  float result;
  __builtin_memcpy(&result, &top, sizeof result);
  return result;
}

// Packs 32 codes of four bits into 16 bytes. code(first) returns kLanes codes, from number `first` on. Of
// each pair of codes, the first takes the upper four bits.
template <class Code>
SHOESTRING_INLINE void pack32(Code code, uint8_t* packed) {
#if defined(__AVX512F__)
  for (int half = 0; half < 2; ++half) {
    __m512i i = (__m512i)code(16 * half);
    __m512i pairs = _mm512_or_si512(_mm512_slli_epi64(i, 4), _mm512_srli_epi64(i, 32));
    _mm_storel_epi64((__m128i*)(packed + 8 * half), _mm512_cvtepi64_epi8(pairs));
  }
#elif defined(__AVX2__)
  const __m256i weight = _mm256_set1_epi32(16 | 1 << 16);
  __m256i i[4];
  for (int k = 0; k < 4; ++k) i[k] = (__m256i)code(8 * k);
  __m256i a = _mm256_madd_epi16(_mm256_packs_epi32(i[0], i[1]), weight);
  __m256i b = _mm256_madd_epi16(_mm256_packs_epi32(i[2], i[3]), weight);
  __m256i words = _mm256_packs_epi32(a, b);
  __m256i bytes = _mm256_packus_epi16(words, words);
  _mm_storeu_si128((__m128i*)packed,
                   _mm_unpacklo_epi16(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
#else
  int32_t index[32];
  for (int k = 0; k < 32; k += kLanes) {
    I32 i = code(k);
    __builtin_memcpy(index + k, &i, sizeof i);
  }
  for (int k = 0; k < 16; ++k) packed[k] = (uint8_t)(index[2 * k] << 4 | index[2 * k + 1]);
#endif
}

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
