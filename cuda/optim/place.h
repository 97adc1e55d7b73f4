#pragma once

// The block of a tensor that a warp of an optimizer kernel updates, and the random bits for this block.

#include "core/philox.h"
#include "cuda/quantization/dynamic_map.h"
#include "optim/optimizer_table.h"

namespace shoestring::cuda {

using kernels::ElementType;
using kernels::kStateBlock;
using kernels::OptimizerArenas;
using kernels::OptimizerEntry;

// Upper bound on the bytes of a kernel's parameters. CUDA allows 32,764 bytes. It places parameters of more
// than 4 KiB at byte 0x1a80 of the constant bank on sm_75 to sm_89, and earlier on newer GPUs. ptxas 13.0
// gives an indexed load from the bank a signed offset of 16 bits. A kernel that indexes a parameter from byte
// 0x8000 on therefore reads other memory, as an H200 has shown.
constexpr int kParameterBytes = 0x8000 - 0x1a80;

// Maximum number of tensors per launch. Their descriptions are kernel parameters.
constexpr int kTensors = 768;

// The tensors of one launch, as a kernel parameter.
struct Group {
  OptimizerEntry entry[kTensors];
  int count;
  const float* steps;
  const float* found_inf;  // a flag in GPU memory, or null; if the flag is nonzero, the step is skipped

  __device__ bool skips() const { return found_inf != nullptr && *found_inf != 0; }
};

// A block of a tensor, as one lane of its warp sees it. The functions compute derived values at each call
// instead of storing them.
struct Place {
  const Group& group;
  uint32_t tensor, own;  // index of the tensor in the launch, and index `own` of the block in the tensor

  __device__ const OptimizerEntry& t() const { return group.entry[tensor]; }
  __device__ ElementType type() const { return static_cast<ElementType>(t().type); }
  __device__ ElementType grad_type() const { return static_cast<ElementType>(t().grad_type); }
  __device__ uint32_t step() const { return static_cast<uint32_t>(group.steps[tensor]); }
  __device__ uint32_t whole_blocks() const { return static_cast<uint32_t>(t().count / kStateBlock); }

  // Number of elements from this lane's first element to the tensor's end.
  __device__ int left() const { return left_of(t().count - uint64_t{own} * kStateBlock); }

  // Index of this lane's first element in the tensor, and in the arena (the optimizer state of all tensors).
  __device__ uint64_t in_tensor() const { return uint64_t{own} * kStateBlock + lane() * kPerLane; }
  __device__ uint32_t arena_block() const { return t().block + own; }
  __device__ uint64_t in_arena() const { return uint64_t{arena_block()} * kStateBlock + lane() * kPerLane; }

  // Returns whether the tensor's weights and gradients are aligned for vector loads.
  __device__ bool aligned() const {
    return ((reinterpret_cast<uintptr_t>(t().param) | reinterpret_cast<uintptr_t>(t().grad)) & 15) == 0;
  }

  // Returns a copy of this object whose members the compiler assumes to be different. The compiler therefore
  // computes derived values again instead of keeping them in registers.
  __device__ Place again() const {
    Place same = *this;
    asm volatile("" : "+r"(same.tensor), "+r"(same.own));
    return same;
  }
};

/// Returns 16 random bits for each of a lane's eight elements. For elements 2w and 2w + 1 they are the lower
/// and the upper half of word w.
__device__ inline kernels::Random4 random_bits(uint64_t seed, const Place& place, uint32_t stream) {
  const uint64_t number = kernels::stream_word(place.t().number, stream);
  return kernels::philox_at(seed, number << 32 | place.step(), uint64_t{place.own} * kWarp + lane());
}

/// Rounds two fp32 numbers to bf16 stochastically: each is rounded up with a probability equal to the
/// fraction that bf16 cuts off. NaN stays NaN.
__device__ inline unsigned round_stochastically(float x, float y, unsigned random) {
  const auto add = [](float v, unsigned up) {
    return v == v ? __float_as_uint(v) + up : __float_as_uint(v) | 0x400000u;
  };
  return __byte_perm(add(x, random & 0xffff), add(y, random >> 16), 0x7632);
}

}  // namespace shoestring::cuda
