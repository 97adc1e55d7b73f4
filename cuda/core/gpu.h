#pragma once

// Properties of the GPU that runs the kernels.

#include <cuda_runtime.h>

namespace shoestring::cuda {

// GPUs of sm_75 lack instructions that kernels with matrix products need. For sm_75 these kernels are
// compiled empty, and the host code does not launch them.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool kHasMma = false;
#else
constexpr bool kHasMma = true;
#endif

/// Writes the compute capability of the current GPU, such as 90 for 9.0, to `capability`. Returns an error
/// text, or null.
inline const char* compute_capability(int& capability) {
  int device = 0, major = 0, minor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  capability = major * 10 + minor;
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace shoestring::cuda
