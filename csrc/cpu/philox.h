#pragma once

// Random bits for a block's elements (kernels/philox.h), a counter a lane.

#include "cpu/vec.h"
#include "kernels/dynamic_map.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

using kernels::kStateBlock;

// x * factor: the products of even lanes and of odd ones, 64 bits each.
SHOESTRING_INLINE void multiply_wide(U32 x, uint32_t factor, U32& even, U32& odd) {
#if defined(__AVX512F__)
  const __m512i f = _mm512_set1_epi64(factor);
  even = (U32)_mm512_mul_epu32((__m512i)x, f);
  odd = (U32)_mm512_mul_epu32(_mm512_srli_epi64((__m512i)x, 32), f);
#elif defined(__AVX2__)
  const __m256i f = _mm256_set1_epi64x(factor);
  even = (U32)_mm256_mul_epu32((__m256i)x, f);
  odd = (U32)_mm256_mul_epu32(_mm256_srli_epi64((__m256i)x, 32), f);
#else
  for (int i = 0; i < kLanes; i += 2) {
    const uint64_t a = uint64_t{x[i]} * factor, b = uint64_t{x[i + 1]} * factor;
    even[i] = static_cast<uint32_t>(a);
    even[i + 1] = static_cast<uint32_t>(a >> 32);
    odd[i] = static_cast<uint32_t>(b);
    odd[i + 1] = static_cast<uint32_t>(b >> 32);
  }
#endif
}

// The upper or lower halves of both, in the order of the lanes.
SHOESTRING_INLINE U32 halves(U32 even, U32 odd, bool upper) {
#if defined(__AVX512F__)
  return upper ? (U32)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64((__m512i)even, 32), (__m512i)odd)
               : (U32)_mm512_mask_blend_epi32(0xaaaa, (__m512i)even, _mm512_slli_epi64((__m512i)odd, 32));
#elif defined(__AVX2__)
  return upper ? (U32)_mm256_blend_epi32(_mm256_srli_epi64((__m256i)even, 32), (__m256i)odd, 0xaa)
               : (U32)_mm256_blend_epi32((__m256i)even, _mm256_slli_epi64((__m256i)odd, 32), 0xaa);
#else
  U32 result;
  for (int i = 0; i < kLanes; i += 2) {
    result[i] = even[i + upper];
    result[i + 1] = odd[i + upper];
  }
  return result;
#endif
}

// 16 bits for each element of a block: counter `index` has those of elements 8 * index to 8 * index + 7, in order.
inline __attribute__((noinline)) void random_block(uint64_t seed, uint32_t step, uint32_t stream, uint64_t block,
                                                   uint16_t* bits) {
  constexpr int kCounters = kStateBlock / 8;
  for (int first = 0; first < kCounters; first += kLanes) {
    const uint64_t index = block * kCounters + first;  // a block's indices have their upper half in common
    U32 lanes;
    for (int i = 0; i < kLanes; ++i) lanes[i] = i;
    U32 c0 = lanes + static_cast<uint32_t>(index), c1 = U32{} + static_cast<uint32_t>(index >> 32);
    U32 c2 = U32{} + step, c3 = U32{} + stream;
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      U32 a_even, a_odd, b_even, b_odd;
      multiply_wide(c0, 0xd2511f53u, a_even, a_odd);
      multiply_wide(c2, 0xcd9e8d57u, b_even, b_odd);
      c0 = halves(b_even, b_odd, true) ^ c1 ^ key0;
      c1 = halves(b_even, b_odd, false);
      c2 = halves(a_even, a_odd, true) ^ c3 ^ key1;
      c3 = halves(a_even, a_odd, false);
      key0 += 0x9e3779b9u;
      key1 += 0xbb67ae85u;
    }
    const U32 words[4] = {c0, c1, c2, c3};
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint32_t own[4] = {words[0][lane], words[1][lane], words[2][lane], words[3][lane]};
      __builtin_memcpy(bits + 8 * (first + lane), own, sizeof own);
    }
  }
}

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
