// Bandwidth-bound, and a row of 131072 fp32 logits (512 KiB) is too long for an SM. The first pass runs through the row
// forwards, for maximum and sum; the second runs backwards, so that what it reads first is still in the L2 cache. Bytes
// per logit: 4 + 4 read (the latter partly from L2) + 2 written; with the GEMM's 4, 14 in all against 6 * features flops.

#include <cmath>

#include "common/check.h"
#include "common/convert.h"
#include "common/launch.h"
#include "common/vector.h"
#include "common/warp.h"
#include "kernels/cuda.h"
#include "kernels/linear_cross_entropy.h"

namespace shoestring::cuda {
namespace {

constexpr int kVector = 4;          // logits that move together
template <class T>
constexpr int kMaxThreads = sizeof(T) == 4 ? 1024 : 256;

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }
__device__ inline float larger(float a, float b) { return fmaxf(a, b); }  // of a NaN and another, the other
__device__ inline double larger(double a, double b) { return fmax(a, b); }
__device__ inline float tangent(float x) { return tanhf(x); }
__device__ inline double tangent(double x) { return tanh(x); }

template <class Out>
__device__ Out narrow(float x) { return rounded<Out>(x); }
template <class Out>
__device__ Out narrow(double x) { return x; }

template <class T>
__device__ constexpr T low() { return -static_cast<T>(INFINITY); }

// Of some of a row's logits. A NaN is in the sum, never in the maximum.
template <class T>
struct Summary {
  T max;
  T sum;    // of exp(logit - max)
  T total;  // of the logits
};

// The same bits whichever comes first: one of the two is multiplied by exactly 1.
template <class T>
__device__ Summary<T> merge(const Summary<T>& a, const Summary<T>& b) {
  const bool first = a.max > b.max;
  const T max = first ? a.max : b.max, less = first ? b.max : a.max;
  const T scale = less > low<T>() ? exponential(less - max) : 0;
  return {max, (first ? a.sum : b.sum) + (first ? b.sum : a.sum) * scale, a.total + b.total};
}

template <class T>
__device__ Summary<T> warp_merge(Summary<T> x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    x = merge(x, Summary<T>{__shfl_xor_sync(kAllLanes, x.max, offset), __shfl_xor_sync(kAllLanes, x.sum, offset),
                            __shfl_xor_sync(kAllLanes, x.total, offset)});
  }
  return x;
}

template <class T>
struct Row {
  T* logits;
  const T* bias;  // or null
  T softcap;
  int vocab;

  __device__ T capped(T z, int i) const {
    if (bias != nullptr) z += bias[i];
    return softcap != 0 ? softcap * tangent(z / softcap) : z;
  }

  // Raw logits 4 v to 4 v + 3 made final; -inf past the vocabulary.
  __device__ void finish(Vector<T, kVector>& z, int v) const {
    if (bias != nullptr) {
      const auto b = load<kVector>(bias + v * kVector);
#pragma unroll
      for (int i = 0; i < kVector; ++i) z[i] += b[i];
    }
    if (softcap != 0) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) z[i] = softcap * tangent(z[i] / softcap);
    }
    if ((v + 1) * kVector > vocab) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (v * kVector + i >= vocab) z[i] = low<T>();
      }
    }
  }
};

// A tile is what a block has in registers at a time: kUnroll vectors a thread, loaded together.
template <class T>
constexpr int kUnroll = sizeof(T) == 4 ? 4 : 1;

template <class T>
__device__ Summary<T> summarise(const Row<T>& row, int vectors, bool want_total) {
  Summary<T> part{low<T>(), 0, 0};
  for (int first = threadIdx.x; first < vectors; first += blockDim.x * kUnroll<T>) {
    Vector<T, kVector> z[kUnroll<T>];
#pragma unroll
    for (int j = 0; j < kUnroll<T>; ++j) {
      const int v = first + j * blockDim.x;
      if (v < vectors) z[j] = load<kVector>(row.logits + v * kVector);
    }
    T max = part.max;
#pragma unroll
    for (int j = 0; j < kUnroll<T>; ++j) {
      const int v = first + j * blockDim.x;
      if (v < vectors) {
        row.finish(z[j], v);
      } else {
        for (int i = 0; i < kVector; ++i) z[j][i] = low<T>();
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        max = larger(z[j][i], max);
        if (want_total && v * kVector + i < row.vocab) part.total += z[j][i];
      }
    }
    // Where all so far are -inf, their exponentials are 0, not those of -inf + inf.
    const T base = max > low<T>() ? max : 0;
    part.sum *= exponential(part.max - base);
    part.max = max;
#pragma unroll
    for (int j = 0; j < kUnroll<T>; ++j) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) part.sum += exponential(z[j][i] - base);
    }
  }
  return part;
}

// The gradient of one row's loss by its raw logits: (exp(z - max) * inverse_sum - floor - onehot) * slope * factor.
template <class T>
struct Gradient {
  T max, inverse_sum, floor, onehot, factor;
  int target;
};

template <class T, class Out>
__device__ void write_gradient(const Row<T>& row, int vectors, const Gradient<T>& g, Out* out) {
  const int tile = blockDim.x * kUnroll<T>;
  for (int n = 0; n * tile < vectors; ++n) {
    Vector<T, kVector> z[kUnroll<T>];
#pragma unroll
    for (int j = 0; j < kUnroll<T>; ++j) {
      const int v = vectors - 1 - (n * tile + j * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x));
      if (v >= 0) z[j] = load<kVector>(row.logits + v * kVector);
    }
#pragma unroll
    for (int j = 0; j < kUnroll<T>; ++j) {
      const int v = vectors - 1 - (n * tile + j * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x));
      if (v < 0) break;
      row.finish(z[j], v);
      const int at = v == g.target / kVector ? g.target % kVector : -1;
      Vector<Out, kVector> result;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        T x = exponential(z[j][i] - g.max) * g.inverse_sum - g.floor;
        if (i == at) x -= g.onehot;
        if (row.softcap != 0) {
          const T ratio = z[j][i] / row.softcap;
          x *= 1 - ratio * ratio;
        }
        result[i] = narrow<Out>(x * g.factor);
      }
      store(out + v * kVector, result);
    }
  }
}

// One block per row.
// Budget: 80 registers, 384 bytes shared, no spills.
template <class T, class Out>
__global__ void __launch_bounds__(kMaxThreads<T>) cross_entropy(kernels::CrossEntropyRows p) {
  __shared__ Summary<T> warps[kMaxThreads<T> / kWarp];
  const int64_t r = blockIdx.x;
  const int vectors = static_cast<int>((p.vocab + kVector - 1) / kVector);
  const Row<T> row{static_cast<T*>(p.logits) + r * p.stride, static_cast<const T*>(p.bias),
                   static_cast<T>(p.softcap), static_cast<int>(p.vocab)};
  Out* gradient = p.gradient == nullptr ? nullptr : static_cast<Out*>(p.gradient) + r * p.stride;
  T* loss = static_cast<T*>(p.loss) + r;

  const int64_t target = p.target[r];
  if (target == p.ignore_index) {
    if (threadIdx.x == 0) *loss = 0;
    Vector<Out, kVector> zero;
    for (int i = 0; i < kVector; ++i) zero[i] = narrow<Out>(T{0});
    for (int v = threadIdx.x; gradient != nullptr && v < vectors; v += blockDim.x) store(gradient + v * kVector, zero);
    return;
  }
  T at_target = 0;
  if (threadIdx.x == 0) {
    if (target < 0 || target >= p.vocab) {
      fail("linear_cross_entropy: target: expected classes in [0, vocab) or ignore_index, received another");
    }
    at_target = row.capped(row.logits[target], static_cast<int>(target));
  }

  const T smooth = static_cast<T>(p.label_smoothing);
  Summary<T> all = warp_merge(summarise(row, vectors, smooth != 0));
  if (lane() == 0) warps[warp()] = all;
  __syncthreads();
  all = warp_merge(lane() < static_cast<int>(blockDim.x) / kWarp ? warps[lane()] : Summary<T>{low<T>(), 0, 0});

  if (threadIdx.x == 0) {
    // Differences to the maximum first: a confident row's loss is small beside its logits.
    T value = logarithm(all.sum) + (1 - smooth) * (all.max - at_target);
    if (smooth != 0) value += smooth * (all.max - all.total / static_cast<T>(p.vocab));
    *loss = value;
  }
  if (gradient == nullptr) return;
  const T factor = static_cast<const T*>(p.factor)[p.factor_per_row ? r : 0];
  write_gradient(row, vectors,
                 Gradient<T>{all.max, 1 / all.sum, static_cast<T>(p.label_smoothing / p.vocab), 1 - smooth, factor,
                             static_cast<int>(target)},
                 gradient);
}

template <class T, class Out>
const char* run(const kernels::CrossEntropyRows& rows, void* stream) {
  // One block an SM, so that the rows in flight are not much more than the L2 cache holds; but a short row is over
  // before a large block has started, and several share an SM.
  const int64_t vocab = rows.vocab;
  const int threads = vocab > 32768 ? kMaxThreads<T> : vocab > 8192 ? kMaxThreads<T> / 2 : vocab > 512 ? 128 : kWarp;
  return launch(cross_entropy<T, Out>, rows.tokens, threads, 0, stream, rows);
}

const kernels::LinearCrossEntropyCuda kTable{run<float, float>, run<float, __nv_bfloat16>, run<float, __half>,
                                             run<double, double>};
const bool kProvided = (provide("linear_cross_entropy", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
