// Bandwidth-bound, and a row of 131072 fp32 logits (512 KiB) is too long for an SM. The first pass runs through the row
// forwards, for maximum and sum; the second runs backwards, so that what it reads first is still in the L2 cache. Bytes
// per logit: 4 + 4 read (the latter partly from L2) + 2 written; with the GEMM's 4, 14 in all against 6 * features flops.

#include <climits>
#include <type_traits>

#include "common/check.h"
#include "common/launch.h"
#include "common/vector.h"
#include "common/warp.h"
#include "kernels/cuda.h"
#include "kernels/linear_cross_entropy.h"
#include "logits.h"

namespace shoestring::cuda {
namespace {

constexpr int kVector = 4;  // logits that move together

__device__ inline float magnitude(float x) { return fabsf(x); }
__device__ inline double magnitude(double x) { return fabs(x); }
__device__ inline float tangent(float x) { return tanhf(x); }
__device__ inline double tangent(double x) { return tanh(x); }

// Of some of a row's logits. A NaN is in the sum, never in the maximum. Without kAll, moment and at are not used.
template <class T>
struct Summary {
  T max = low<T>();
  T sum = 0;                                                      // of e = exp(z - max)
  T total = 0;                                                    // of class weight * z, where labels are smoothed
  T moment = 0;                                                   // of e (z - max)
  std::conditional_t<sizeof(T) == 4, int, int64_t> at = INT_MAX;  // the first of the largest, if that is not -inf
};

// The same bits whichever comes first: one of the two is multiplied by exactly 1.
template <bool kAll, class T>
__device__ Summary<T> merge(const Summary<T>& a, const Summary<T>& b) {
  const bool first = a.max > b.max;
  const T max = first ? a.max : b.max, less = first ? b.max : a.max, sum = first ? b.sum : a.sum;
  const T scale = less > low<T>() ? exponential(less - max) : 0;
  Summary<T> result{max, (first ? a.sum : b.sum) + sum * scale, a.total + b.total};
  if constexpr (kAll) {
    // Where scale is zero, less - max may be -inf.
    const T moved = scale != 0 ? ((first ? b.moment : a.moment) + sum * (less - max)) * scale : 0;
    result.moment = (first ? a.moment : b.moment) + moved;
    result.at = a.max == b.max ? (a.at < b.at ? a.at : b.at) : first ? a.at : b.at;
  }
  return result;
}

template <bool kAll, class T>
__device__ Summary<T> warp_merge(Summary<T> x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    Summary<T> other{__shfl_xor_sync(kAllLanes, x.max, offset), __shfl_xor_sync(kAllLanes, x.sum, offset),
                     __shfl_xor_sync(kAllLanes, x.total, offset)};
    if constexpr (kAll) {
      other.moment = __shfl_xor_sync(kAllLanes, x.moment, offset);
      other.at = __shfl_xor_sync(kAllLanes, x.at, offset);
    }
    x = merge<kAll>(x, other);
  }
  return x;
}

template <class T>
struct Row {
  T* logits;
  const T* bias;           // or null
  const T* class_weights;  // or null
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
      for (int i = 0; i < kVector; ++i) z[i] = v * kVector + i < vocab ? z[i] : low<T>();
    }
  }

  __device__ Vector<T, kVector> weights(int v) const {
    return class_weights != nullptr ? load<kVector>(class_weights + v * kVector) : Vector<T, kVector>{{1, 1, 1, 1}};
  }
};

// A tile is what a block has in registers at a time: kUnroll vectors a thread, loaded together.
template <class T>
constexpr int kUnroll = sizeof(T) == 4 ? 4 : 1;

template <bool kAll, class T>
__device__ Summary<T> summarise(const Row<T>& row, int vectors, bool want_total) {
  Summary<T> part;
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
        if (want_total) {
          const auto w = row.weights(v);
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            if (v * kVector + i < row.vocab) part.total += w[i] * z[j][i];
          }
        }
      } else {
        for (int i = 0; i < kVector; ++i) z[j][i] = low<T>();
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (kAll && z[j][i] > max) part.at = v * kVector + i;
        max = larger(z[j][i], max);
      }
    }
    // Where all so far are -inf, their exponentials are 0, not those of -inf + inf.
    const T base = max > low<T>() ? max : 0, change = part.max - base;
    if (kAll && part.sum != 0) part.moment = (part.moment + part.sum * change) * exponential(change);
    part.sum *= exponential(change);
    part.max = max;
#pragma unroll
    for (int j = 0; j < kUnroll<T>; ++j) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const T x = z[j][i] - base, e = exponential(x);
        part.sum += e;
        if (kAll && e != 0) part.moment += e * x;  // where e is zero, x may be -inf
      }
    }
  }
  return part;
}

// The gradient of one row by its raw logits: with x = z - max,
//   (exp(x) * (multiply - slope * x) - floor * class weight - onehot) * softcap's derivative.
template <class T>
struct Gradient {
  T max, multiply, slope, floor, onehot;
  int target;
  T least;         // of a class that is marked in
  unsigned* live;  // a byte for each, or null
};

template <bool kAll, class T, class Out>
__device__ void write_gradient(const Row<T>& row, int vectors, const Gradient<T>& g, Out* out) {
  constexpr int kTogether = kAll && kUnroll<T> > 2 ? 2 : kUnroll<T>;  // longer code, so fewer copies
  const int tile = blockDim.x * kTogether;
  for (int n = 0; n * tile < vectors; ++n) {
    Vector<T, kVector> z[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int v = vectors - 1 - (n * tile + j * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x));
      if (v >= 0) z[j] = load<kVector>(row.logits + v * kVector);
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int v = vectors - 1 - (n * tile + j * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x));
      if (v < 0) break;
      row.finish(z[j], v);
      const auto w = row.weights(v);
      const int at = v == g.target / kVector ? g.target % kVector : -1;
      Vector<Out, kVector> result;
      unsigned marks = 0;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const T x = z[j][i] - g.max, e = exponential(x);
        T multiply = g.multiply;
        if (kAll && e != 0) multiply -= g.slope * x;
        T y = e * multiply - g.floor * w[i];
        if (i == at) y -= g.onehot;
        if (row.softcap != 0) {
          const T ratio = z[j][i] / row.softcap;
          y *= 1 - ratio * ratio;
        }
        result[i] = narrow<Out>(y);
        if (kAll && !(y < g.least && -y < g.least)) marks |= 1u << (8 * i);
      }
      if (kAll && g.live != nullptr && marks != 0) atomicOr(g.live + v, marks);
      store(out + v * kVector, result);
    }
  }
}

// One block per row. kAll: class weights, entropy, argmax, a gradient by the entropy or live classes are wanted.
// Budget: 80 registers, 640 bytes shared, no spills.
template <class T, class Out, bool kAll>
__global__ void __launch_bounds__(kMaxThreads<T>) cross_entropy(kernels::CrossEntropyRows p) {
  __shared__ Summary<T> warps[kMaxThreads<T> / kWarp];
  const int64_t r = blockIdx.x;
  const int vectors = static_cast<int>((p.vocab + kVector - 1) / kVector);
  const Row<T> row{static_cast<T*>(p.logits) + r * p.stride, static_cast<const T*>(p.bias),
                   kAll ? static_cast<const T*>(p.class_weights) : nullptr, static_cast<T>(p.softcap),
                   static_cast<int>(p.vocab)};
  Out* gradient = p.gradient == nullptr ? nullptr : static_cast<Out*>(p.gradient) + r * p.stride;
  const auto write = [&](T loss, T lse, T entropy, int64_t argmax) {
    static_cast<T*>(p.loss)[r] = loss;
    static_cast<T*>(p.lse)[r] = lse;
    if (kAll && p.entropy != nullptr) static_cast<T*>(p.entropy)[r] = entropy;
    if (kAll && p.argmax != nullptr) p.argmax[r] = argmax;
  };

  const int64_t target = p.target[r];
  if (target == p.ignore_index) {
    if (threadIdx.x == 0) write(0, 0, 0, -1);
    Vector<Out, kVector> zero;
    for (int i = 0; i < kVector; ++i) zero[i] = narrow<Out>(T{0});
    for (int v = threadIdx.x; gradient != nullptr && v < vectors; v += blockDim.x) store(gradient + v * kVector, zero);
    return;
  }
  if (threadIdx.x == 0 && (target < 0 || target >= p.vocab)) {
    fail("linear_cross_entropy: target: expected classes in [0, vocab) or ignore_index, received another");
  }
  const T at_target = threadIdx.x == 0 ? row.capped(row.logits[target], static_cast<int>(target)) : 0;
  const T smooth = static_cast<T>(p.label_smoothing);
  Summary<T> all = warp_merge<kAll>(summarise<kAll>(row, vectors, smooth != 0));
  if (lane() == 0) warps[warp()] = all;
  __syncthreads();
  all = warp_merge<kAll>(lane() < static_cast<int>(blockDim.x) / kWarp ? warps[lane()] : Summary<T>{});

  const bool weighted = row.class_weights != nullptr;
  const T total_weight = weighted ? *static_cast<const T*>(p.total_weight) : static_cast<T>(p.vocab);
  const T sure = weighted ? row.class_weights[target] * (1 - smooth) : 1 - smooth;
  const T share = static_cast<T>(p.label_smoothing / p.vocab), z_loss = static_cast<T>(p.z_loss);
  const T log_sum = logarithm(all.sum), lse = all.max + log_sum, inverse = 1 / all.sum;
  const T mean = kAll ? all.moment * inverse : 0;  // of z - max
  if (threadIdx.x == 0) {
    // Differences to the maximum first: a confident row's loss is small beside its logits.
    T loss = sure * (log_sum + (all.max - at_target));
    if (smooth != 0) loss += share * (total_weight * log_sum + (total_weight * all.max - all.total));
    if (z_loss != 0) loss += z_loss * lse * lse;
    write(loss, lse, log_sum - mean, all.at == INT_MAX ? 0 : all.at);
  }
  if (gradient == nullptr) return;
  const auto upstream = [&](const void* factors, int64_t stride) {
    return factors == nullptr ? 0 : static_cast<const T*>(factors)[r * stride] * static_cast<T>(p.factor);
  };
  const T u = upstream(p.grad_loss, p.grad_loss_stride), v = upstream(p.grad_lse, p.grad_lse_stride);
  const T h = kAll ? upstream(p.grad_entropy, p.grad_entropy_stride) : 0;
  T multiply = u * (sure + share * total_weight) + v;
  if (z_loss != 0) multiply += u * 2 * z_loss * lse;
  if (kAll && h != 0) multiply += h * mean;  // lse - entropy - z = mean - (z - max)
  const T size = magnitude(u) + magnitude(v) + magnitude(h);
  const Gradient<T> g{all.max, multiply * inverse, h * inverse, u * share, u * sure, static_cast<int>(target),
                      static_cast<T>(p.filter_eps) * size, size != 0 ? p.live : nullptr};
  write_gradient<kAll>(row, vectors, g, gradient);
}

template <class T, class Out>
const char* run(const kernels::CrossEntropyRows& rows, void* stream) {
  auto* kernel = cross_entropy<T, Out, true>;
  if constexpr (sizeof(T) == 4) {
    const bool all = rows.class_weights != nullptr || rows.entropy != nullptr || rows.argmax != nullptr ||
                     rows.grad_entropy != nullptr || rows.live != nullptr;
    if (!all) kernel = cross_entropy<T, Out, false>;
  }
  return launch(kernel, rows.tokens, threads_for<T>(rows.vocab), 0, stream, rows);
}

const kernels::LinearCrossEntropyCuda kTable{run<float, float>, run<float, __nv_bfloat16>, run<float, __half>,
                                             run<double, double>};
const bool kProvided = (provide("linear_cross_entropy", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
