#pragma once

// Marks functions that CPU and CUDA kernels share. They are always inlined, and nvcc compiles them for the
// host and the GPU.
#if defined(__CUDACC__)
#define SHOESTRING_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define SHOESTRING_HOST_DEVICE inline __attribute__((always_inline))
#endif
