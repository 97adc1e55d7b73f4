// Quantises fp32 tensors to the 8-bit format of optimizer state, and dequantises them, on the GPU. A warp
// handles a block of 256 elements, eight per lane.

#include "core/cuda_tables.h"
#include "cuda/core/launch.h"
#include "cuda/quantization/dynamic_map.h"
#include "quantization/quantize_8bit_table.h"

namespace shoestring::cuda {
namespace {

using kernels::kStateBlock;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocksPerWarp = 4;

// Calls body(index of the first element, index of the block) for each block of 256 elements that this warp
// handles.
template <class Body>
__device__ void over_blocks(int64_t n, Body body) {
  const int64_t first = int64_t{blockIdx.x} * (kWarps * kBlocksPerWarp) + warp();
  for (int k = 0; k < kBlocksPerWarp; ++k) {
    const int64_t block = first + k * kWarps;
    if (block * kStateBlock < n) body(block * kStateBlock, block);
  }
}

// Budget: 64 registers, 1088 bytes shared, no spills.
template <bool kSigned>
__global__ void __launch_bounds__(kThreads)
    quantize(const float* x, int64_t n, bool aligned, const __grid_constant__ MapConstants constants,
             uint8_t* codes, float* scale) {
  __shared__ SharedMap map;
  fill<kSigned>(map, constants);
  __syncthreads();
  over_blocks(n, [&](int64_t begin, int64_t block) {
    const int left = left_of(n - begin);
    const bool vectors = n - begin >= kStateBlock;
    const int64_t at = begin + lane() * kPerLane;
    auto values = load_part(x + at, left, vectors && aligned).values();
    const float most = largest_magnitude<true>(values.value);
    if (lane() == 0) scale[block] = most;
    const uint2 encoded = encode<kSigned>(values.value, most, map, constants.bend);
    Vector<uint8_t, kPerLane> part;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) part[i] = (i < 4 ? encoded.x : encoded.y) >> (i % 4 * 8) & 0xff;
    store_part(codes + at, left, vectors, part);
  });
}

// Budget: 40 registers, 1088 bytes shared, no spills.
template <bool kSigned>
__global__ void __launch_bounds__(kThreads)
    dequantize(const uint8_t* codes, const float* scale, int64_t n, bool aligned,
               const __grid_constant__ MapConstants constants, float* x) {
  __shared__ SharedMap map;
  fill<kSigned>(map, constants);
  __syncthreads();
  over_blocks(n, [&](int64_t begin, int64_t block) {
    const int left = left_of(n - begin);
    const bool vectors = n - begin >= kStateBlock;
    const int64_t at = begin + lane() * kPerLane;
    const auto part = load_part(codes + at, left, vectors && aligned).values();
    const float factor = scale[block];
    Vector<float, kPerLane> values;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) values[i] = map.value[part[i]] * factor;
    store_part(x + at, left, vectors, values);
  });
}

constexpr int64_t kPerBlock = kWarps * kBlocksPerWarp * kStateBlock;

const char* run_quantize(const float* x, int64_t n, bool is_signed, uint8_t* codes, float* scale,
                         void* stream) {
  return launch(is_signed ? quantize<true> : quantize<false>, (n + kPerBlock - 1) / kPerBlock, kThreads, 0,
                stream, x, n, aligned(x), make_constants(is_signed), codes, scale);
}

const char* run_dequantize(const uint8_t* codes, const float* scale, int64_t n, bool is_signed, float* x,
                           void* stream) {
  return launch(is_signed ? dequantize<true> : dequantize<false>, (n + kPerBlock - 1) / kPerBlock, kThreads,
                0, stream, codes, scale, n, aligned(codes, kPerLane), make_constants(is_signed), x);
}

const kernels::Quantize8bitCuda kTable{run_quantize, run_dequantize};
const bool kProvided = (provide("quantize_8bit", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
