#pragma once

// Marks functions that CPU and CUDA kernels share: always inline, and also compiled for the GPU by nvcc.
#if defined(__CUDACC__)
#define SHOESTRING_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define SHOESTRING_HOST_DEVICE inline __attribute__((always_inline))
#endif
