#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace shoestring::cuda {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

/// To the nearest, ties to even.
template <class T>
__device__ T rounded(float x);
template <>
__device__ inline float rounded<float>(float x) { return x; }
template <>
__device__ inline __nv_bfloat16 rounded<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <>
__device__ inline __half rounded<__half>(float x) { return __float2half_rn(x); }

}  // namespace shoestring::cuda
