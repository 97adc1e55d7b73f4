// Seeded dropout on CUDA. The mask is a function of the seed and the index of the element. It is not saved,
// because backward computes it again. A thread has eight adjacent elements, whose random bits come from one
// Philox counter. The kernel reads the seed from GPU memory, so that each replay of a captured CUDA graph
// uses the current seed.

#include "core/cuda_tables.h"
#include "cuda/core/convert.h"
#include "cuda/core/launch.h"
#include "cuda/core/vector.h"
#include "layers/seeded_dropout_table.h"

namespace shoestring::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 8;

// If kEdge, x or out is not aligned for vector accesses.
// Budget: 40 registers, 0 bytes shared, no spills.
template <class T, bool kEdge>
__global__ void __launch_bounds__(kThreads)
    drop(const T* x, int64_t count, const int64_t* seed, kernels::Dropout rule, T* out) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x, i = index * kWidth;
  if (i >= count) return;
  const bool whole = !kEdge && count - i >= kWidth;
  Vector<T, kWidth> values;
  if (whole) {
    values = load<kWidth>(x + i);
  } else {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      if (i + k < count) values[k] = x[i + k];
    }
  }
  const kernels::Random4 random =
      kernels::philox_at(static_cast<uint64_t>(*seed), 0, static_cast<uint64_t>(index));
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    const uint32_t drawn = random.value[k / 2] >> (k % 2 * 16) & 0xffffu;
    values[k] = rounded<T>(drawn < rule.threshold ? 0.f : to_float(values[k]) * rule.scale);
  }
  if (whole) {
    store(out + i, values);
    return;
  }
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    if (i + k < count) out[i + k] = values[k];
  }
}

template <class T>
const char* run(const void* data, int64_t count, const int64_t* seed, kernels::Dropout rule, void* result,
                void* stream) {
  const T* x = static_cast<const T*>(data);
  T* out = static_cast<T*>(result);
  constexpr int64_t kTile = int64_t{kThreads} * kWidth;
  return launch(aligned(x) && aligned(out) ? drop<T, false> : drop<T, true>, (count + kTile - 1) / kTile,
                kThreads, 0, stream, x, count, seed, rule, out);
}

const kernels::SeededDropoutCuda kTable{run<float>, run<__nv_bfloat16>, run<__half>};
const bool kProvided = (provide("seeded_dropout", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
