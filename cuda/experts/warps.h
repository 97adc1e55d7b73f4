#pragma once

// Kernels of experts in which a warp works alone, with memory of its own for each expert.

#include <cstdint>

#include "cuda/core/launch.h"
#include "cuda/core/warp.h"

namespace shoestring::cuda {
namespace {

constexpr int kExpertWarps = 4;  // the largest number of warps in a block

// The launch of a warp for each of `count` parts, each with `bytes` of shared memory. As many warps form a
// block as fit into the 48 KiB that every GPU has.
struct ExpertWarps {
  ExpertWarps(int64_t count, int64_t bytes) {
    const int64_t fitting = (int64_t{48} << 10) / bytes,
                  warps = fitting < kExpertWarps ? fitting : kExpertWarps;
    blocks = (count + warps - 1) / warps;
    threads = static_cast<int>(warps) * kWarp;
    shared_bytes = static_cast<int>(warps * bytes);
  }
  int64_t blocks;
  int threads, shared_bytes;
};

// Returns the index of the warp among all warps of the launch.
__device__ inline int64_t warp_of_launch() {
  return int64_t{blockIdx.x} * (static_cast<int>(blockDim.x) / kWarp) + warp();
}

// Returns the warp's own shared memory of `count` elements.
template <class T>
__device__ T* shared_of_warp(int64_t count) {
  return reinterpret_cast<T*>(dynamic_shared()) + warp() * count;
}

}  // namespace
}  // namespace shoestring::cuda
