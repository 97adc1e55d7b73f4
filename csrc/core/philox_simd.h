#pragma once

// Generates random bits for the elements of a block as core/philox.h does, with one Philox counter per 64-bit
// lane.

#include "core/philox.h"
#include "core/vec_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

// Each 64-bit lane holds one 32-bit word of a counter in its lower half; its upper half is ignored. A
// multiplication leaves the product's lower word in place. A shift by 32 bits gives the upper word.
constexpr int kCounterLanes = kLanes / 2;
typedef uint64_t U64 __attribute__((vector_size(kBytes)));

SHOESTRING_INLINE U64 multiply_words(U64 x, uint32_t factor) {
#if defined(__AVX512F__)
  return (U64)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
  return (U64)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(factor));
#else
  return (x & 0xffffffffu) * factor;
#endif
}

// Stores one Philox counter per lane, with its four words side by side. The words of the counter of lane i
// are in lane i of a, b, c and d.
SHOESTRING_INLINE void store_counters(uint32_t* to, U64 a, U64 b, U64 c, U64 d) {
  const U64 low = (a & 0xffffffffu) | b << 32, high = (c & 0xffffffffu) | d << 32;
#if defined(__AVX512F__)
  const __m512i first = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11),
                second = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
  _mm512_storeu_si512(to, _mm512_permutex2var_epi64((__m512i)low, first, (__m512i)high));
  _mm512_storeu_si512(to + kLanes, _mm512_permutex2var_epi64((__m512i)low, second, (__m512i)high));
#elif defined(__AVX2__)
  const __m256i even = _mm256_unpacklo_epi64((__m256i)low, (__m256i)high);
  const __m256i odd = _mm256_unpackhi_epi64((__m256i)low, (__m256i)high);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute2x128_si256(even, odd, 0x20));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + kLanes), _mm256_permute2x128_si256(even, odd, 0x31));
#else
  for (int i = 0; i < kCounterLanes; ++i) {
    const uint64_t words[2] = {low[i], high[i]};
    __builtin_memcpy(to + 4 * i, words, sizeof words);
  }
#endif
}

// Generates 16 random bits for each element of a block. Counter `index` gives the bits of the elements 8 *
// index to 8 * index + 7.
inline __attribute__((noinline)) void random_block(uint64_t seed, uint32_t step, uint32_t stream,
                                                   uint64_t block, uint16_t* bits) {
  // Four registers are processed together, so that the latency of their multiplications overlaps.
  constexpr int kCounters = kernels::kRandomBlock / 8, kTogether = 4;
  U64 lanes;
  for (int i = 0; i < kCounterLanes; ++i) lanes[i] = i;
  uint32_t words[4 * kCounters];
  for (int first = 0; first < kCounters; first += kTogether * kCounterLanes) {
    U64 c[kTogether][4];
#pragma GCC unroll 4
    for (int j = 0; j < kTogether; ++j) {
      // `index` is the counter of lane 0, and each lane adds its number to it. The addition does not carry
      // into the counter's upper word.
      const uint64_t index = block * kCounters + first + j * kCounterLanes;
      c[j][0] = lanes + index;
      c[j][1] = U64{} + (index >> 32);
      c[j][2] = U64{} + step;
      c[j][3] = U64{} + stream;
    }
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < kernels::kPhiloxRounds; ++round) {
#pragma GCC unroll 4
      for (int j = 0; j < kTogether; ++j) {
        const U64 a = multiply_words(c[j][0], 0xd2511f53u), b = multiply_words(c[j][2], 0xcd9e8d57u);
        c[j][0] = b >> 32 ^ c[j][1] ^ key0;
        c[j][1] = b;
        c[j][2] = a >> 32 ^ c[j][3] ^ key1;
        c[j][3] = a;
      }
      key0 += 0x9e3779b9u;
      key1 += 0xbb67ae85u;
    }
#pragma GCC unroll 4
    for (int j = 0; j < kTogether; ++j) {
      store_counters(words + 4 * (first + j * kCounterLanes), c[j][0], c[j][1], c[j][2], c[j][3]);
    }
  }
  __builtin_memcpy(bits, words, sizeof words);
}

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
