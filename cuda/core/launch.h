#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace shoestring::cuda {

#if defined(__CUDACC__)
/// Returns the text of an error, or null if there is none.
inline const char* text_of(cudaError_t error) {
  if (error == cudaErrorNoKernelImageForDevice) {
    return "this build has no kernels for the GPU; build with -DSHOESTRING_CUDA_ARCHITECTURES=wheel, or with "
           "the "
           "GPU's number, such as 89";
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
#endif

/// Launches a kernel and returns an error text or null. Every kernel of the library is launched by this
/// function. shared_bytes is the size of the memory that dynamic_shared() returns. Sizes above 48 KiB need an
/// attribute of the kernel, which is set first.
template <class... Parameters, class... Arguments>
const char* launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes, void* stream,
                   Arguments... arguments) {
  if (blocks == 0) return nullptr;
  if (blocks > INT32_MAX) return "more than 2^31 - 1 blocks";
#if defined(__CUDACC__)
  cudaError_t error = cudaSuccess;
  if (shared_bytes > 48 << 10) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return text_of(error);
  }
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(
      arguments...);
  return text_of(cudaGetLastError());
#else
  return simt::launch(reinterpret_cast<const void*>(kernel), blocks, threads, shared_bytes, stream,
                      [=]() SIMT_UNCHECKED { kernel(arguments...); });
#endif
}

/// Returns the kernel's dynamic shared memory, which is aligned to 16 bytes.
__device__ inline unsigned char* dynamic_shared() {
#if defined(__CUDACC__)
  extern __shared__ __align__(16) unsigned char shoestring_dynamic_shared[];
  return shoestring_dynamic_shared;
#else
  return simt::dynamic_shared();
#endif
}

}  // namespace shoestring::cuda
