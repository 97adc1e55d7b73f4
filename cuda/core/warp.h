#pragma once

#include <cuda_runtime.h>

namespace shoestring::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffff;

__device__ inline int lane() { return threadIdx.x % kWarp; }
__device__ inline int warp() { return threadIdx.x / kWarp; }

/// Reduces the values of a warp's 32 lanes with combine(a, b). Every lane gets the same result, bit for bit.
template <class T, class Combine>
__device__ T warp_reduce(T x, Combine combine) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x = combine(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
}

/// Returns the maximum over the lanes of a warp; from sm_80 on this is one instruction.
__device__ inline unsigned warp_max(unsigned x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAllLanes, x);
#else
  return warp_reduce(x, [](unsigned a, unsigned b) { return a > b ? a : b; });
#endif
}

}  // namespace shoestring::cuda
