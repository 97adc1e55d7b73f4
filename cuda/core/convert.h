#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace shoestring::cuda {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

/// Converts two adjacent numbers to fp32, which for bf16 takes two instructions: the lower number is shifted,
/// the upper one masked.
__device__ inline float2 to_floats(const float* x) { return {x[0], x[1]}; }
__device__ inline float2 to_floats(const __half* x) { return {to_float(x[0]), to_float(x[1])}; }
__device__ inline float2 to_floats(const __nv_bfloat16* x) {
  unsigned bits;
  memcpy(&bits, x, sizeof bits);
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}

/// Rounds an fp32 number to T, to nearest, ties to even.
template <class T>
__device__ T rounded(float x);
template <>
__device__ inline float rounded<float>(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 rounded<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline __half rounded<__half>(float x) {
  return __float2half_rn(x);
}

/// Rounds x and y to the type of `to` and stores both. The 16-bit types need one rounding instruction for
/// both numbers.
__device__ inline void round_pair(float x, float y, float* to) {
  to[0] = x;
  to[1] = y;
}
__device__ inline void round_pair(float x, float y, __nv_bfloat16* to) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  to[0] = pair.x;
  to[1] = pair.y;
}
__device__ inline void round_pair(float x, float y, __half* to) {
  const __half2 pair = __floats2half2_rn(x, y);
  to[0] = pair.x;
  to[1] = pair.y;
}

}  // namespace shoestring::cuda
