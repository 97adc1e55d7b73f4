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

}  // namespace shoestring::cuda
