// A block has a row. What its threads read while they look for the largest magnitude stays in registers, as
// far as it fits there; the rest of a longer row comes from the L2 cache when it is read again.

#include <cmath>

#include "core/cuda_tables.h"
#include "cuda/core/convert.h"
#include "cuda/core/launch.h"
#include "cuda/core/vector.h"
#include "cuda/core/warp.h"
#include "quantization/quantize_int8_table.h"

namespace shoestring::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kWidth = 8;  // neighbours in a thread: eight bytes of codes
constexpr int kVectors = 2;
constexpr int kStep = kThreads * kWidth;  // from a thread's vector to its next
constexpr int kChunk = kVectors * kStep;

__device__ unsigned larger(unsigned a, unsigned b) { return a > b ? a : b; }

// kEdge: rows may begin and end anywhere.
// Budget: 64 registers, 32 bytes shared, no spills.
template <class T, bool kEdge>
__global__ void __launch_bounds__(kThreads)
    quantize(const T* x, int64_t columns, int8_t* codes, float* absmax) {
  __shared__ unsigned largest[kWarps];
  x += blockIdx.x * columns;
  codes += blockIdx.x * columns;
  Vector<T, kWidth> part[kVectors];
  const auto read = [&](int64_t from) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t i = from + v * kStep;
      if (!kEdge && i < columns) part[v] = load<kWidth>(x + i);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (kEdge ? i + k >= columns : i >= columns) {
          part[v][k] = rounded<T>(0.f);
        } else if (kEdge) {
          part[v][k] = x[i + k];
        }
      }
    }
  };

  const int64_t first = threadIdx.x * kWidth;
  unsigned top = 0;  // magnitudes as integers: NaN is the largest of them
  for (int64_t from = first; from < columns; from += kChunk) {
    read(from);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) top = larger(top, __float_as_uint(to_float(part[v][k])) & 0x7fffffff);
    }
  }
  top = warp_max(top);
  if (lane() == 0) largest[warp()] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) top = larger(top, largest[w]);

  const float scale = __fmul_rn(1 / __uint_as_float(top), 127.f);  // two roundings, as on the CPU
  const bool plain = scale > 0 && scale < INFINITY;  // else the row is all (but) zero, or not finite
  if (threadIdx.x == 0) absmax[blockIdx.x] = __uint_as_float(top);
  for (int64_t from = first; from < columns; from += kChunk) {
    if (columns > kChunk) read(from);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t i = from + v * kStep;
      if (i >= columns) break;
      Vector<int8_t, kWidth> out;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        out[k] = static_cast<int8_t>(plain ? __float2int_rn(__fmul_rn(to_float(part[v][k]), scale)) : 0);
      }
      if (!kEdge) {
        store(codes + i, out);
        continue;
      }
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (i + k < columns) codes[i + k] = out[k];
      }
    }
  }
}

template <class T>
const char* run(const void* data, int64_t rows, int64_t columns, int8_t* codes, float* absmax, void* stream) {
  const T* x = static_cast<const T*>(data);
  const bool vectors = columns % kWidth == 0 && aligned(x) && aligned(codes, kWidth);
  return launch(vectors ? quantize<T, false> : quantize<T, true>, rows, kThreads, 0, stream, x, columns,
                codes, absmax);
}

const kernels::QuantizeInt8Cuda kTable{run<float>, run<__nv_bfloat16>, run<__half>};
const bool kProvided = (provide("quantize_int8", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
