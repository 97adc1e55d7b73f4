#pragma once

// For what the kernels of every device share: inline everywhere, and on a GPU where nvcc compiles it.
#if defined(__CUDACC__)
#define SHOESTRING_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define SHOESTRING_HOST_DEVICE inline __attribute__((always_inline))
#endif
