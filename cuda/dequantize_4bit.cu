// Bandwidth-bound: half a byte in, two or four out. A thread reads 8 bytes (16 codes, all under one scale, since a block
// has at least 32 elements) and writes 16-byte vectors. The table of 16 values lies in 16 different banks of shared
// memory, so a warp's look-ups never conflict.

#include "common/convert.h"
#include "common/launch.h"
#include "kernels/cuda.h"
#include "kernels/quantize_4bit.h"

namespace shoestring::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 16;

struct Values {
  float value[16];
};

__device__ float scale_of(const kernels::Packed& p, int64_t block) {
  if (p.codes == nullptr) return p.absmax[block];
  // Two roundings, as on the CPU: not an fma.
  return __fadd_rn(__fmul_rn(p.nested[1 + p.codes[block]], p.nested[257 + block / 256]), p.nested[0]);
}

template <class T>
__global__ void __launch_bounds__(kThreads) dequantize(kernels::Packed p, Values values, int64_t count, bool aligned,
                                                       T* out) {
  __shared__ float table[16];
  if (threadIdx.x < 16) table[threadIdx.x] = values.value[threadIdx.x];
  __syncthreads();
  const int64_t begin = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kPerThread;
  if (begin >= count) return;
  const float scale = scale_of(p, begin / p.block_size);
  if (aligned && begin + kPerThread <= count) {
    const uint2 codes = *reinterpret_cast<const uint2*>(p.packed + begin / 2);
    alignas(16) T block[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      // Byte i / 2 of the eight; the even element in its upper half.
      const unsigned byte = ((i < 8 ? codes.x : codes.y) >> (i / 2 % 4 * 8)) & 0xff;
      block[i] = rounded<T>(table[i % 2 == 0 ? byte >> 4 : byte & 15] * scale);
    }
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof block / 16); ++i) {
      reinterpret_cast<uint4*>(out + begin)[i] = reinterpret_cast<const uint4*>(block)[i];
    }
    return;
  }
  for (int64_t i = begin; i < count && i < begin + kPerThread; ++i) {
    const unsigned byte = p.packed[i / 2];
    out[i] = rounded<T>(table[i % 2 == 0 ? byte >> 4 : byte & 15] * scale);
  }
}

template <class T>
const char* run(const kernels::Packed& p, int64_t count, void* out, void* stream) {
  Values values;
  for (int i = 0; i < 16; ++i) values.value[i] = p.codebook->value[i];
  const bool aligned =
      reinterpret_cast<uintptr_t>(p.packed) % 8 == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0;
  const int64_t per_block = int64_t{kThreads} * kPerThread;
  return launch(dequantize<T>, (count + per_block - 1) / per_block, kThreads, 0, stream, p, values, count, aligned,
                static_cast<T*>(out));
}

const kernels::Dequantize4bitCuda kTable{run<float>, run<__nv_bfloat16>, run<__half>};
const bool kProvided = (provide("dequantize_4bit", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
