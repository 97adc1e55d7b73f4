#pragma once

// Where a warp of an optimizer is: at a block of a tensor of a launch. And the random bits of that place.

#include "core/philox.h"
#include "cuda/quantization/dynamic_map.h"
#include "optim/optimizer_table.h"

namespace shoestring::cuda {

using kernels::ElementType;
using kernels::kStateBlock;
using kernels::OptimizerArenas;
using kernels::OptimizerEntry;

constexpr int kTensors = 1000;  // of a launch, whose parameters have room for 32,764 bytes

struct Group {
  OptimizerEntry entry[kTensors];
  int count;
  const float* steps;
  const float* found_inf;  // or null

  __device__ bool skips() const { return found_inf != nullptr && *found_inf != 0; }
};

// A block of a tensor as a lane sees it. What follows from it is computed wherever it is needed.
struct Place {
  const Group& group;
  uint32_t tensor, own;  // the block among the tensor's own

  __device__ const OptimizerEntry& t() const { return group.entry[tensor]; }
  __device__ ElementType type() const { return static_cast<ElementType>(t().type); }
  __device__ ElementType grad_type() const { return static_cast<ElementType>(t().grad_type); }
  __device__ uint32_t step() const { return static_cast<uint32_t>(group.steps[tensor]); }
  __device__ uint32_t whole_blocks() const { return static_cast<uint32_t>(t().count / kStateBlock); }

  // Elements before the tensor's end, from the lane's first on.
  __device__ int left() const { return left_of(t().count - uint64_t{own} * kStateBlock); }

  // Where the lane's elements begin.
  __device__ uint64_t in_tensor() const { return uint64_t{own} * kStateBlock + lane() * kPerLane; }
  __device__ uint32_t arena_block() const { return t().block + own; }
  __device__ uint64_t in_arena() const { return uint64_t{arena_block()} * kStateBlock + lane() * kPerLane; }

  // Whether vectors of weights and of gradients lie at their addresses.
  __device__ bool aligned() const {
    return ((reinterpret_cast<uintptr_t>(t().param) | reinterpret_cast<uintptr_t>(t().grad)) & 15) == 0;
  }

  // The same, but that the compiler does not know it: it computes everything anew, and keeps nothing in
  // registers.
  __device__ Place again() const {
    Place same = *this;
    asm volatile("" : "+r"(same.tensor), "+r"(same.own));
    return same;
  }
};

/// 16 bits for each of a lane's elements: those of 2w and 2w + 1 are the lower and upper half of word w.
__device__ inline kernels::Random4 random_bits(uint64_t seed, const Place& place, uint32_t stream) {
  const uint64_t number = kernels::stream_word(place.t().number, stream);
  return kernels::philox_at(seed, number << 32 | place.step(), uint64_t{place.own} * kWarp + lane());
}

/// Two bf16, each up with the probability of what is cut off. NaN stays NaN.
__device__ inline unsigned round_stochastically(float x, float y, unsigned random) {
  const auto add = [](float v, unsigned up) {
    return v == v ? __float_as_uint(v) + up : __float_as_uint(v) | 0x400000u;
  };
  return __byte_perm(add(x, random & 0xffff), add(y, random >> 16), 0x7632);
}

}  // namespace shoestring::cuda
