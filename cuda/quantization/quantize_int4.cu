// Quantises weights to int4 on the GPU: fits scale and offset of each block, and encodes. Half a warp handles
// a block, so a sum takes four shuffles and no barrier. The fit reads the block about a dozen times, but from
// the L1 cache, so that arithmetic limits the kernel.

#include <cmath>

#include "core/cuda_tables.h"
#include "cuda/core/convert.h"
#include "cuda/core/launch.h"
#include "cuda/core/warp.h"
#include "quantization/fake_quantize_table.h"
#include "quantization/fit_int4.h"

namespace shoestring::cuda {
namespace {

using kernels::Int4Fit;
using kernels::kInt4Lanes;

constexpr int kThreads = 256, kBlocks = kThreads / kInt4Lanes;
// Number of thread blocks that a multiprocessor holds at a time: as many as its registers allow without
// spills, and on sm_75 as many as it has threads for.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kResident = 4;
#else
constexpr int kResident = 5;
#endif

/// Reduces the values of the 16 lanes that handle a block with combine(a, b). Every lane gets the same
/// result, bit for bit.
template <class T, class Combine>
__device__ T fold(T x, Combine combine) {
#pragma unroll
  for (int offset = kInt4Lanes / 2; offset > 0; offset /= 2)
    x = combine(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
}
__device__ float sum(float x) {
  return fold(x, [](float a, float b) { return a + b; });
}

/// Returns a code (-8 to 7) plus kInt4Shift; the addition rounds to an integer and puts the code into the
/// lowest bits. NaN gets the code -8. `away` is the element minus the block's offset, and `inverse` is 1 /
/// scale.
__device__ float shifted(float away, float inverse) {
  return __fadd_rn(fminf(fmaxf(__fmul_rn(away, inverse), -8.f), 7.f), kernels::kInt4Shift);
}

// If kFake, writes the dequantised values to `fake` instead of codes and scales.
// Budget: 48 registers, 0 bytes shared, no spills.
template <class T, bool kFake>
__global__ void __launch_bounds__(kThreads, kResident)
    quantize(const T* x, int64_t count, int block_size, uint8_t* packed, kernels::Int4Scale* scales,
             T* fake) {
  const int64_t block = int64_t{blockIdx.x} * kBlocks + threadIdx.x / kInt4Lanes, begin = block * block_size;
  const int first = threadIdx.x % kInt4Lanes;
  // A half-warp whose block starts past the end of x has no elements, but its lanes take part in the
  // shuffles.
  const int n = begin >= count               ? 0
                : count - begin < block_size ? static_cast<int>(count - begin)
                                             : block_size;
  x += begin;

  float low = INFINITY, high = -INFINITY;
  bool finite = true;
  for (int i = first; i < n; i += kInt4Lanes) {
    const float value = to_float(x[i]);
    low = fminf(low, value);
    high = fmaxf(high, value);
    finite = finite && fabsf(value) < INFINITY;
  }
  low = fold(low, [](float a, float b) { return fminf(a, b); });
  high = fold(high, [](float a, float b) { return fmaxf(a, b); });
  finite = fold(static_cast<int>(finite), [](int a, int b) { return a & b; }) != 0;

  Int4Fit fit = kernels::first_int4(low, high), best = fit;
  float smallest = INFINITY, limit = fit.scale * 0.5f;
  for (int step = 0; step <= kernels::kInt4Steps; ++step) {
    const float inverse = fit.inverse();
    float error = 0;
    kernels::Int4Sums sums{};
    for (int i = first; i < n; i += kInt4Lanes) {
      const float away = to_float(x[i]) - fit.offset;
      const float code = shifted(away, inverse) - kernels::kInt4Shift;
      const float rest = away - code * fit.scale;  // the product code * scale is exact
      const float pull = fmaxf(fminf(rest, limit), -limit);
      error += fabsf(rest);
      sums.codes += code;
      sums.squares += code * code;  // the sum of squared codes is exact, because codes are small integers
      sums.pulls += pull;
      sums.products += __fmul_rn(code, pull);
    }
    error = sum(error);
    if (error < smallest) {
      smallest = error;
      best = fit;
    }
    fit =
        kernels::next_int4(fit, {sum(sums.codes), sum(sums.squares), sum(sums.pulls), sum(sums.products)}, n);
    limit *= kernels::kInt4Decay;
  }
  if (!finite) best = kernels::nan_int4();
  if (low == 0 && high == 0) best = {0, 0};
  const float inverse = best.inverse();
  if constexpr (kFake) {
    for (int i = first; i < n; i += kInt4Lanes) {
      const float code = shifted(to_float(x[i]) - best.offset, inverse) - kernels::kInt4Shift;
      fake[begin + i] = rounded<T>(__fmaf_rn(code, best.scale, best.offset));
    }
    return;
  }
  if (n > 0 && first == 0) scales[block] = best.packed();
  packed += begin / 2;
  for (int i = first; i - first < block_size; i += kInt4Lanes) {
    const unsigned code =
        i < n ? (__float_as_uint(shifted(to_float(x[i]) - best.offset, inverse)) + 8) & 15 : 0;
    const unsigned next = __shfl_xor_sync(kAllLanes, code, 1);
    if (first % 2 == 0 && i < n) packed[i / 2] = static_cast<uint8_t>(code << 4 | next);
  }
}

template <class T, bool kFake>
const char* start(const void* x, int64_t count, int64_t block_size, uint8_t* packed,
                  kernels::Int4Scale* scales, void* fake, void* stream) {
  const int64_t blocks = (count + block_size - 1) / block_size;
  return launch(quantize<T, kFake>, (blocks + kBlocks - 1) / kBlocks, kThreads, 0, stream,
                static_cast<const T*>(x), count, static_cast<int>(block_size), packed, scales,
                static_cast<T*>(fake));
}

template <class T>
const char* run(const void* x, int64_t count, int64_t block_size, uint8_t* packed, kernels::Int4Scale* scales,
                void* stream) {
  return start<T, false>(x, count, block_size, packed, scales, nullptr, stream);
}

template <class T>
const char* run_fake(const void* x, int64_t count, int64_t block_size, const kernels::Codebook*, void* out,
                     void* stream) {
  return start<T, true>(x, count, block_size, nullptr, nullptr, out, stream);
}

const kernels::QuantizeInt4Cuda kTable{run<float>, run<__nv_bfloat16>, run<__half>};
const kernels::FakeQuantizeCuda kFakeTable{run_fake<float>, run_fake<__nv_bfloat16>, run_fake<__half>};
const bool kProvided = (provide("quantize_int4", &kTable), provide("fake_quantize_int4", &kFakeTable), true);

}  // namespace
}  // namespace shoestring::cuda
