#pragma once

// CuTe's headers for g++. CuTe addresses shared memory by __cvta_generic_to_shared, which only GPUs have.
// Here it returns offsets in an array.

#include <cstddef>

#include <cuda.h>
#include <cuda_runtime.h>

namespace twins {
/// Stands for shared memory, of which only addresses are taken.
inline constexpr int kSharedBytes = 256 << 10;
alignas(1024) inline unsigned char cute_shared[kSharedBytes];
}  // namespace twins

inline size_t __cvta_generic_to_shared(const void* p) {
  return static_cast<size_t>(static_cast<const unsigned char*>(p) - twins::cute_shared);
}
#define CUTE_CVTA_GENERIC_TO_SHARED_ACTIVATED 1
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // for n that is no power of 2
// CuTe encodes tensor maps only if it believes that nvcc of CUDA 12 or later compiles it.
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0

#include <cute/tensor.hpp>

#include <cute/atom/copy_traits_sm75.hpp>
#include <cute/atom/copy_traits_sm90_tma.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/atom/mma_traits_sm90_gmma_ext.hpp>
