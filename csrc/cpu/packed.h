#pragma once

// What the readers of quantised tensors share.

#include "cpu/vec.h"
#include "kernels/quantize_4bit.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

// The product is rounded before the sum, as in bitsandbytes: no fused multiply-add.
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

// A register of int8 codes.
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

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
