// Quantises fp32 tensors to the 4-bit format of optimizer state, and dequantises them, on the GPU. Memory
// bandwidth limits the kernels. A warp handles four blocks of 256 elements, whose loads are independent of
// each other.

#include "core/cuda_tables.h"
#include "cuda/core/launch.h"
#include "cuda/core/vector.h"
#include "cuda/quantization/map_4bit.h"
#include "quantization/quantize_state_4bit_table.h"

namespace shoestring::cuda {
namespace {

using kernels::kScales4;
using kernels::kStateBlock;
using kernels::Rounding4;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocksPerWarp = 4;
constexpr int64_t kPerBlock = int64_t{kWarps} * kBlocksPerWarp * kStateBlock;

// Calls body(block, index of this lane's first element, number of elements from there to the tensor's end)
// for each block of a warp. The third argument may be above eight or negative.
template <class Body>
__device__ void over_blocks(int64_t n, Body body) {
  const int64_t first = int64_t{blockIdx.x} * (kWarps * kBlocksPerWarp) + warp();
#pragma unroll
  for (int k = 0; k < kBlocksPerWarp; ++k) {
    const int64_t block = first + k * kWarps, at = block * kStateBlock + lane() * kPerLane4;
    if (block * kStateBlock < n) body(block, at, n - at);
  }
}

// Budget: 40 registers, 0 bytes shared, no spills.
template <bool kSigned>
__global__ void __launch_bounds__(kThreads)
    quantize(const float* x, int64_t n, bool aligned, Rounding4 rounding, uint32_t* codes, float* scale) {
  over_blocks(n, [&](int64_t block, int64_t at, int64_t left) {
    Vector<float, kPerLane4> part;
    if (aligned && left >= kPerLane4) {
      part = load<kPerLane4>(x + at);
    } else {
#pragma unroll
      for (int i = 0; i < kPerLane4; ++i) part[i] = i < left ? x[at + i] : 0;
    }
    const float block_scale = find_scale4<kSigned>(part.value);
    if (lane() % kGroupLanes4<kSigned> == 0)
      scale[block * kScales4<kSigned> + lane() / kGroupLanes4<kSigned>] = block_scale;
    codes[at / kPerLane4] = encode4<kSigned>(part.value, block_scale, rounding);
  });
}

// Budget: 44 registers, 0 bytes shared, no spills.
template <bool kSigned>
__global__ void __launch_bounds__(kThreads)
    dequantize(const uint32_t* codes, const float* scale, int64_t n, bool aligned, float* x) {
  over_blocks(n, [&](int64_t block, int64_t at, int64_t left) {
    Vector<float, kPerLane4> part;
    decode4<kSigned>(codes[at / kPerLane4], scale[block * kScales4<kSigned> + lane() / kGroupLanes4<kSigned>],
                     part.value);
    if (aligned && left >= kPerLane4) {
      store(x + at, part);
    } else {
#pragma unroll
      for (int i = 0; i < kPerLane4; ++i) {
        if (i < left) x[at + i] = part[i];
      }
    }
  });
}

const char* run_quantize(const float* x, int64_t n, bool is_signed, Rounding4 rounding, uint8_t* codes,
                         float* scale, void* stream) {
  return launch(is_signed ? quantize<true> : quantize<false>, (n + kPerBlock - 1) / kPerBlock, kThreads, 0,
                stream, x, n, aligned(x), rounding, reinterpret_cast<uint32_t*>(codes), scale);
}

const char* run_dequantize(const uint8_t* codes, const float* scale, int64_t n, bool is_signed, float* x,
                           void* stream) {
  return launch(is_signed ? dequantize<true> : dequantize<false>, (n + kPerBlock - 1) / kPerBlock, kThreads,
                0, stream, reinterpret_cast<const uint32_t*>(codes), scale, n, aligned(x), x);
}

const kernels::QuantizeState4bitCuda kTable{run_quantize, run_dequantize};
const bool kProvided = (provide("quantize_state_4bit", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
