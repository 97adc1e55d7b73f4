#pragma once

// The group of threads that computes a row of rms_norm or layer_norm, and the assignment of the row's
// elements to threads.

#include "cuda/core/convert.h"
#include "cuda/core/vector.h"
#include "cuda/core/warp.h"

namespace shoestring::cuda {
namespace {

constexpr int kEach = 16;  // maximum number of elements of a row that a thread holds in registers
constexpr int kWarps = 4;  // warps per block, if each warp has its own row
// Maximum number of warps that compute one row; with this many warps per block, a thread can have 128
// registers.
constexpr int kMostWarps = 16;
// threads per block for a row that does not fit into registers and is therefore read twice
constexpr int kThreads = 256;

// The threads that compute one row: a warp (kWarp), a block (kBlock), or a block whose registers cannot hold
// the row (kLong).
enum class Group { kWarp, kBlock, kLong };

// Returns the sums of x.x and of x.y over all threads of the group, to every thread. Two successive calls
// need different `slots` in shared memory, because a thread may still read the slots of the previous call.
template <Group kGroup>
__device__ float2 group_sum(float2 x, float2* slots) {
  const auto add = [](float a, float b) { return a + b; };
  x = {warp_reduce(x.x, add), warp_reduce(x.y, add)};
  if (kGroup == Group::kWarp) return x;
  if (lane() == 0) slots[warp()] = x;
  __syncthreads();
  float2 total = {0, 0};
  for (int i = 0; i < static_cast<int>(blockDim.x) / kWarp; ++i)
    total = {total.x + slots[i].x, total.y + slots[i].y};
  return total;
}

template <Group kGroup>
struct Member {
  static constexpr bool kHeld = kGroup != Group::kLong;
  __device__ static int index() { return kGroup == Group::kWarp ? lane() : static_cast<int>(threadIdx.x); }
  __device__ static int size() { return kGroup == Group::kWarp ? kWarp : static_cast<int>(blockDim.x); }
  __device__ static int64_t group() {
    return kGroup == Group::kWarp ? int64_t{blockIdx.x} * kWarps + warp() : int64_t{blockIdx.x};
  }

  // Calls body(j, i) for each vector of N elements of the row that belongs to this thread. j is the vector's
  // index in the thread's registers, and i the index of its first element in the row.
  template <int N, class Body>
  __device__ static void sweep(int64_t features, Body body) {
    if constexpr (kHeld) {
#pragma unroll
      for (int j = 0; j < kEach / N; ++j) {
        const int64_t i = (int64_t{j} * size() + index()) * N;
        if (i < features) body(j, i);
      }
    } else {
      for (int64_t i = int64_t{index()} * N; i < features; i += int64_t{size()} * N) body(0, i);
    }
  }
};

// Loads N elements of a norm's weight or bias as fp32. The tensor has dtype fp32 if `wide`, and T otherwise.
template <int N, class T>
__device__ Vector<float, N> parameters(const void* from, bool wide, int64_t i) {
  if (wide) return load<N>(static_cast<const float*>(from) + i);
  const auto raw = load<N>(static_cast<const T*>(from) + i);
  Vector<float, N> values;
#pragma unroll
  for (int k = 0; k < N; ++k) values[k] = to_float(raw[k]);
  return values;
}

}  // namespace
}  // namespace shoestring::cuda
