#pragma once

// The types and conversions of CUDA's cuda_bf16.h for the emulator.

#include "cuda_runtime.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 x) { return __builtin_bit_cast(float, unsigned{x.bits} << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  if (x != x) return {0x7fff};
  const unsigned u = __builtin_bit_cast(unsigned, x);
  return {static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
inline __nv_bfloat16 __float2bfloat16(float x) { return __float2bfloat16_rn(x); }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  return {__float2bfloat16_rn(a), __float2bfloat16_rn(b)};
}
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {__bfloat162float(x.x), __bfloat162float(x.y)}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return {x}; }
