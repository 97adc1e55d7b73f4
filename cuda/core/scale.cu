// Multiplies a tensor by a factor that is in GPU memory, so that the host need not wait to read it. The
// factor is the upstream gradient of a loss and usually 1. The kernel therefore reads it first and returns at
// once if it is 1, which saves a pass over the tensor.

#include "core/cuda_tables.h"
#include "core/scale_table.h"
#include "cuda/core/convert.h"
#include "cuda/core/launch.h"
#include "cuda/core/vector.h"

namespace shoestring::cuda {
namespace {

constexpr int kThreads = 256;
// Maximum number of blocks in a launch: several for every SM, but so few that a launch is cheap if its blocks
// return at once.
constexpr int64_t kMaxBlocks = 2048;

template <class T>
__device__ T times(T x, float factor) {
  return rounded<T>(to_float(x) * factor);
}
__device__ inline double times(double x, double factor) { return x * factor; }

// Budget: 40 registers, 0 bytes shared, no spills.
template <class T, class Factor>
__global__ void __launch_bounds__(kThreads) scale(T* x, int64_t count, const Factor* factor) {
  constexpr int kVector = 16 / sizeof(T);
  const Factor f = *factor;
  if (f == 1) return;
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t beyond = reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T),
                before = beyond == 0 ? 0 : kVector - beyond;
  const int64_t head = before < count ? before : count, vectors = (count - head) / kVector;
  for (int64_t v = first; v < vectors; v += int64_t{gridDim.x} * kThreads) {
    T* to = x + head + v * kVector;
    auto values = load<kVector>(to);
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] = times(values[i], f);
    store(to, values);
  }
  // Scales the elements before the first 16-byte vector and after the last one.
  const int64_t rest = first < head ? first : first + vectors * kVector;
  if (rest < count) x[rest] = times(x[rest], f);
}

template <class T, class Factor>
const char* run(void* x, int64_t count, const void* factor, void* stream) {
  const int64_t per_block = int64_t{kThreads} * (16 / sizeof(T));
  const int64_t blocks = (count + per_block - 1) / per_block;
  return launch(scale<T, Factor>, blocks < kMaxBlocks ? blocks : kMaxBlocks, kThreads, 0, stream,
                static_cast<T*>(x), count, static_cast<const Factor*>(factor));
}

const kernels::ScaleCuda kTable{run<float, float>, run<__nv_bfloat16, float>, run<__half, float>,
                                run<double, double>};
const bool kProvided = (provide("scale", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
