#pragma once

// One hardware instruction each, where CUDA's own functions take several: an error of a unit or two in the last place,
// subnormal numbers taken for zero.

#include <cuda_runtime.h>

namespace shoestring::cuda {

#if defined(__CUDA_ARCH__)

__device__ inline float fast_sqrt(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float fast_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// In [0, 1]; NaN becomes 0.
__device__ inline float saturate(float x) { return __saturatef(x); }

/// Byte i of the result is byte (selector >> 4 i) & 7 of the eight bytes of `low` and `high`.
__device__ inline unsigned pick_bytes(unsigned low, unsigned high, unsigned selector) {
  return __byte_perm(low, high, selector);
}

#else

__device__ inline float fast_sqrt(float x) { return sqrtf(x); }
__device__ inline float fast_reciprocal(float x) { return 1 / x; }
__device__ inline float fast_log2(float x) { return log2f(x); }
__device__ inline float saturate(float x) { return fminf(fmaxf(x, 0.f), 1.f); }
__device__ inline unsigned pick_bytes(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  unsigned picked = 0;
  for (int i = 0; i < 4; ++i) picked |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return picked;
}

#endif

/// |x| as an unsigned integer: the order of magnitudes, NaN above infinity.
__device__ inline unsigned magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

}  // namespace shoestring::cuda
