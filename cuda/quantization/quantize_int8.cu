// Quantises rows to int8 on the GPU, one thread block per row. The elements that threads read to find the
// row's largest magnitude stay in registers, if the row fits. A longer row is read again, from the L2 cache.
// Fake quantisation is the same kernel, which stores the values of the codes.

#include <cmath>
#include <type_traits>

#include "core/cuda_tables.h"
#include "cuda/core/convert.h"
#include "cuda/core/launch.h"
#include "cuda/core/vector.h"
#include "cuda/core/warp.h"
#include "quantization/fake_quantize_table.h"
#include "quantization/quantize_int8_table.h"

namespace shoestring::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kWidth = 8;  // consecutive elements per vector; their codes are eight bytes
constexpr int kVectors = 2;
constexpr int kStep = kThreads * kWidth;  // elements from one vector of a thread to the thread's next vector
constexpr int kChunk = kVectors * kStep;

__device__ unsigned larger(unsigned a, unsigned b) { return a > b ? a : b; }

// Returns where a kernel stores: codes, or with kFake the dequantised values.
template <bool kFake, class T>
__device__ auto* target(int8_t* codes, T* fake) {
  if constexpr (kFake) {
    return fake;
  } else {
    return codes;
  }
}

// If kEdge, rows may begin and end at any address. If kFake, writes the dequantised values to `fake` instead
// of codes and scales.
// Budget: 64 registers, 32 bytes shared, no spills.
template <class T, bool kEdge, bool kFake>
__global__ void __launch_bounds__(kThreads)
    quantize(const T* x, int64_t columns, int8_t* codes, float* absmax, T* fake) {
  __shared__ unsigned largest[kWarps];
  x += blockIdx.x * columns;
  if constexpr (kFake) {
    fake += blockIdx.x * columns;
  } else {
    codes += blockIdx.x * columns;
  }
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
  unsigned top = 0;  // largest magnitude as an integer, in which NaN is above infinity
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

  // The scale is (1 / largest magnitude) * 127. As on the CPU, the quotient is rounded first, and then the
  // product.
  const float scale = __fmul_rn(1 / __uint_as_float(top), 127.f);
  // If `plain` is false, the codes become 0: the row is zero or nearly zero, or its largest magnitude is not
  // finite.
  const bool plain = scale > 0 && scale < INFINITY;
  if (!kFake && threadIdx.x == 0) absmax[blockIdx.x] = __uint_as_float(top);
  for (int64_t from = first; from < columns; from += kChunk) {
    if (columns > kChunk) read(from);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t i = from + v * kStep;
      if (i >= columns) break;
      // With kFake, `out` holds the codes' values, else the codes.
      Vector<std::conditional_t<kFake, T, int8_t>, kWidth> out;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const int code = plain ? __float2int_rn(__fmul_rn(to_float(part[v][k]), scale)) : 0;
        if constexpr (kFake) {
          out[k] = rounded<T>(
              __fmul_rn(__fmul_rn(static_cast<float>(code), __uint_as_float(top)), kernels::kInverse127));
        } else {
          out[k] = static_cast<int8_t>(code);
        }
      }
      auto* to = target<kFake>(codes, fake) + i;
      if constexpr (kEdge) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          if (i + k < columns) to[k] = out[k];
        }
      } else {
        store(to, out);
      }
    }
  }
}

template <class T>
const char* run(const void* data, int64_t rows, int64_t columns, int8_t* codes, float* absmax, void* stream) {
  const T* x = static_cast<const T*>(data);
  const bool vectors = columns % kWidth == 0 && aligned(x) && aligned(codes, kWidth);
  return launch(vectors ? quantize<T, false, false> : quantize<T, true, false>, rows, kThreads, 0, stream, x,
                columns, codes, absmax, static_cast<T*>(nullptr));
}

template <class T>
const char* run_fake(const void* data, int64_t count, int64_t columns, const kernels::Codebook*, void* out,
                     void* stream) {
  const T* x = static_cast<const T*>(data);
  const bool vectors = columns % kWidth == 0 && aligned(x) && aligned(out);
  return launch(vectors ? quantize<T, false, true> : quantize<T, true, true>, count / columns, kThreads, 0,
                stream, x, columns, static_cast<int8_t*>(nullptr), static_cast<float*>(nullptr),
                static_cast<T*>(out));
}

const kernels::QuantizeInt8Cuda kTable{run<float>, run<__nv_bfloat16>, run<__half>};
const kernels::FakeQuantizeCuda kFakeTable{run_fake<float>, run_fake<__nv_bfloat16>, run_fake<__half>};
const bool kProvided = (provide("quantize_int8", &kTable), provide("fake_quantize_int8", &kFakeTable), true);

}  // namespace
}  // namespace shoestring::cuda
