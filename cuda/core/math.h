#pragma once

// Fast approximations of sqrt, 1 / x, 2^x and log2, one hardware instruction each; CUDA's own functions take
// several. The error is one or two units in the last place, and subnormal numbers count as zero.

#include <cuda_runtime.h>

namespace shoestring::cuda {

#if defined(__CUDACC__)

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
__device__ inline float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float fast_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#else

__device__ inline float fast_sqrt(float x) { return simt_sqrt_approx(x); }
__device__ inline float fast_reciprocal(float x) { return simt_rcp_approx(x); }
__device__ inline float fast_exp2(float x) { return simt_ex2_approx(x); }
__device__ inline float fast_log2(float x) { return simt_lg2_approx(x); }

#endif

/// Returns 1 / x, correctly rounded, for x from 2^-100 to 2^100. `near` is within one unit in the last place
/// of 1 / x, as fast_reciprocal(x) is. A Newton step from one unit below is wrong for one of the 2^23
/// mantissas, and from one unit above for 32, each time by one unit. So the next number beyond the exact
/// result is tried as well. Both remainders are exact.
__device__ inline float round_reciprocal(float x, float near) {
  const float step = __fmaf_rn(near, -__fmaf_rn(near, x, -1.f), near), rest = __fmaf_rn(-step, x, 1.f);
  const float other = __uint_as_float(__float_as_uint(step) + (rest > 0 ? 1u : ~0u));
  return fabsf(__fmaf_rn(-other, x, 1.f)) < fabsf(rest) ? other : step;
}

}  // namespace shoestring::cuda
