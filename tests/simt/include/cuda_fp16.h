#pragma once

// The types and conversions of CUDA's cuda_fp16.h for the emulator.

#include "cuda_runtime.h"

struct __half {
  uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};

inline float __half2float(__half x) {
  if ((x.bits & 0x7fff) > 0x7c00)
    return __builtin_bit_cast(float, 0x7fffffffu);  // every NaN becomes this one
  return static_cast<float>(__builtin_bit_cast(_Float16, x.bits));
}
inline __half __float2half_rn(float x) {
  if (x != x) return {0x7fff};
  return {__builtin_bit_cast(uint16_t, static_cast<_Float16>(x))};
}
inline __half __float2half(float x) { return __float2half_rn(x); }
inline __half2 __floats2half2_rn(float a, float b) { return {__float2half_rn(a), __float2half_rn(b)}; }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(unsigned short x) { return {x}; }
