#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace shoestring::cuda {

/// Starts a kernel; returns the error's text, or null. The one place from which kernels are started.
template <class... Parameters, class... Arguments>
const char* launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes, void* stream,
                   Arguments... arguments) {
  if (blocks == 0) return nullptr;
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(arguments...);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <class T>
__device__ T rounded(float x);
template <>
__device__ inline float rounded<float>(float x) { return x; }
template <>
__device__ inline __nv_bfloat16 rounded<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <>
__device__ inline __half rounded<__half>(float x) { return __float2half_rn(x); }

}  // namespace shoestring::cuda
