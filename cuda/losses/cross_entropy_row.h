#pragma once

// Device code for one row of logits: a block of threads computes the row's statistics, and then its gradient.

#include <climits>
#include <cmath>
#include <type_traits>

#include "cuda/core/convert.h"
#include "cuda/core/vector.h"
#include "cuda/core/warp.h"
#include "cuda/losses/logits.h"

namespace shoestring::cuda {
namespace {

template <class In>
constexpr int kVector = sizeof(In) == 2 ? 8 : 4;  // logits per vector, which has 16 bytes (fp64: 32)
// The dtype in which the loss of logits with dtype In is computed: double for fp64, and float for all others.
template <class In>
using Compute = std::conditional_t<sizeof(In) == 8, double, float>;
__device__ inline double widened(double x) { return x; }
template <class In>
__device__ float widened(In x) {
  return to_float(x);
}

__device__ inline float magnitude(float x) { return fabsf(x); }
__device__ inline double magnitude(double x) { return fabs(x); }
__device__ inline float tangent(float x) { return tanhf(x); }
__device__ inline double tangent(double x) { return tanh(x); }

// The statistics of a part of a row's logits z. If a logit is NaN, then `sum` is NaN, but `max` ignores it.
// Without kAll, `moment` and `at` are not used.
template <class T>
struct Summary {
  T max = low<T>();
  T sum = 0;     // sum of e = exp(z - max)
  T total = 0;   // sum of class weight * (z - reference), for label smoothing
  T moment = 0;  // sum of e * (z - max)
  // Index of the first largest logit; INT_MAX if all logits are -inf.
  std::conditional_t<sizeof(T) == 4, int, int64_t> at = INT_MAX;
};

// Merges the statistics of two parts of a row. merge(a, b) and merge(b, a) have the same bits, because the
// sum of the part with the larger maximum is used unscaled.
template <bool kAll, class T>
__device__ Summary<T> merge(const Summary<T>& a, const Summary<T>& b) {
  const bool first = a.max > b.max;
  const T max = first ? a.max : b.max, less = first ? b.max : a.max, sum = first ? b.sum : a.sum;
  const T scale = less > low<T>() ? exponential(less - max) : 0;
  Summary<T> result{max, (first ? a.sum : b.sum) + sum * scale, a.total + b.total};
  if constexpr (kAll) {
    // `less` is the smaller maximum, and scale = exp(less - max). If scale is zero, less - max may be -inf,
    // and the product of the two would be NaN.
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

// A row of raw logits. If kRagged, the row may begin at any address, and the memory before and after it must
// not be accessed. `logits` then points to a multiple of 16 bytes, `lead` elements before the row. If not
// kRagged, the row begins at a multiple of 16 bytes, and its memory extends to a whole number of vectors.
template <class In, bool kRagged>
struct Row {
  using T = Compute<In>;
  using Raw = Vector<In, kVector<In>>;
  using Final = Vector<T, kVector<In>>;
  static constexpr int kSize = kVector<In>;

  const In* logits;
  const T* bias;           // bias of the classes, or null; always null if kRagged
  const T* class_weights;  // weights of the classes, or null
  T softcap, scale;        // `scale` multiplies the raw logits; it is 1 unless kRagged
  int lead, vocab;

  __device__ int before() const { return kRagged ? lead : 0; }
  __device__ int vectors() const { return (before() + vocab + kSize - 1) / kSize; }
  __device__ int index(int v, int i) const { return v * kSize + i - before(); }
  __device__ bool has(int i) const { return (!kRagged || i >= 0) && i < vocab; }
  __device__ bool whole(int v) const { return (!kRagged || index(v, 0) >= 0) && index(v, kSize) <= vocab; }

  __device__ T capped(int i) const {
    T z = widened(logits[i + before()]);
    if (kRagged) z *= scale;
    if (!kRagged && bias != nullptr) z += bias[i];
    return softcap != 0 ? softcap * tangent(z / softcap) : z;
  }

  __device__ Raw raw(int v) const {
    if constexpr (kRagged) {
      if (!whole(v)) {
        Raw z;
        for (int i = 0; i < kSize; ++i) z[i] = has(index(v, i)) ? logits[v * kSize + i] : narrow<In>(T{0});
        return z;
      }
    }
    return load<kSize>(logits + v * kSize);
  }

  // Computes the final logits (scale, bias, softcap) of a vector of raw logits. Elements outside the row
  // become -inf.
  __device__ Final finish(const Raw& raw, int v) const {
    Final z;
#pragma unroll
    for (int i = 0; i < kSize; ++i) z[i] = kRagged ? widened(raw[i]) * scale : widened(raw[i]);
    if (!kRagged && bias != nullptr) {
      const auto b = load<kSize>(bias + v * kSize);
#pragma unroll
      for (int i = 0; i < kSize; ++i) z[i] += b[i];
    }
    if (softcap != 0) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) z[i] = softcap * tangent(z[i] / softcap);
    }
    if (!whole(v)) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) z[i] = has(index(v, i)) ? z[i] : low<T>();
    }
    return z;
  }

  __device__ Final weights(int v) const {
    Final w;
#pragma unroll
    for (int i = 0; i < kSize; ++i) w[i] = 1;
    if (class_weights == nullptr) return w;
    if constexpr (kRagged) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) w[i] = has(index(v, i)) ? class_weights[index(v, i)] : 0;
      return w;
    } else {
      return load<kSize>(class_weights + v * kSize);
    }
  }
};

// The memory for a row's gradient. If kRagged, `to` points to `lead` elements before the gradient, like the
// pointer `logits` of a Row.
template <class Out, class Row, bool kRagged>
struct Place {
  Out* to;
  bool aligned;

  __device__ void put(const Row& row, int v, const Vector<Out, Row::kSize>& x) const {
    if constexpr (kRagged) {
      if (!aligned || !row.whole(v)) {
        for (int i = 0; i < Row::kSize; ++i) {
          if (row.has(row.index(v, i))) to[v * Row::kSize + i] = x[i];
        }
        return;
      }
    }
    store(to + v * Row::kSize, x);
  }
};

// Number of vectors that a thread loads together. With 16-bit and fp32 logits this is 16 logits per thread,
// with fp64 it is 4.
template <class In>
constexpr int kUnroll = sizeof(In) == 8 ? 1 : 16 / kVector<In>;

// Returns the statistics of the logits that this thread reads. `reference` is a logit of the row, or 0 if
// that is not finite: sums of large logits would lose their differences to rounding.
template <bool kAll, class In, bool kRagged>
__device__ Summary<Compute<In>> summarise(const Row<In, kRagged>& row, bool want_total,
                                          Compute<In> reference) {
  using T = Compute<In>;
  const int vectors = row.vectors();
  Summary<T> part;
  for (int first = threadIdx.x; first < vectors; first += blockDim.x * kUnroll<In>) {
    typename Row<In, kRagged>::Raw raw[kUnroll<In>];
    typename Row<In, kRagged>::Final z[kUnroll<In>];
#pragma unroll
    for (int j = 0; j < kUnroll<In>; ++j) {
      const int v = first + j * blockDim.x;
      if (v < vectors) raw[j] = row.raw(v);
    }
    T max = part.max;
#pragma unroll
    for (int j = 0; j < kUnroll<In>; ++j) {
      const int v = first + j * blockDim.x;
      if (v < vectors) {
        z[j] = row.finish(raw[j], v);
        if (want_total) {
          const auto w = row.weights(v);
#pragma unroll
          for (int i = 0; i < kVector<In>; ++i) {
            if (row.has(row.index(v, i))) part.total += w[i] * (z[j][i] - reference);
          }
        }
      } else {
        for (int i = 0; i < kVector<In>; ++i) z[j][i] = low<T>();
      }
#pragma unroll
      for (int i = 0; i < kVector<In>; ++i) {
        if (kAll && z[j][i] > max) part.at = row.index(v, i);
        max = larger(z[j][i], max);
      }
    }
    // If all logits so far are -inf, base is 0. The exponentials are then 0; with base = max they would be
    // exp(-inf + inf), which is NaN.
    const T base = max > low<T>() ? max : 0, change = part.max - base;
    if (kAll && part.sum != 0) part.moment = (part.moment + part.sum * change) * exponential(change);
    part.sum *= exponential(change);
    part.max = max;
#pragma unroll
    for (int j = 0; j < kUnroll<In>; ++j) {
#pragma unroll
      for (int i = 0; i < kVector<In>; ++i) {
        const T x = z[j][i] - base, e = exponential(x);
        part.sum += e;
        // if e = exp(x) is zero, x may be -inf, and e * x would be NaN
        if (kAll && e != 0) part.moment += e * x;
      }
    }
  }
  return part;
}

// The constants of one row's gradient with respect to its raw logits. With x = z - max, the gradient is
//   (exp(x) * (multiply - slope * x) - floor * class weight - onehot) * softcap's derivative,
// where onehot is subtracted for the target class only, and onehot2 for the second target.
template <class T>
struct Gradient {
  T max, multiply, slope, floor, onehot, onehot2;
  int target;
  T least;         // threshold: `live` marks the classes whose gradients have at least this magnitude
  unsigned* live;  // marks, one byte per class; null if not requested, and always null if kRagged
};

// The second target of a row, in shared memory. In registers it would occupy every thread during the loop
// over the row.
template <class T>
struct Second {
  int at;   // its class; -1 if the row has none
  T value;  // its logit, and then its gradient
};

// Returns the gradient of a class with logit z and class weight `weight`. `onehot` is that of a target, else
// 0.
template <bool kAll, class T>
__device__ T derivative(const Gradient<T>& g, T softcap, T z, T weight, T onehot) {
  const T x = z - g.max, e = exponential(x);
  T multiply = g.multiply;
  if (kAll && e != 0) multiply -= g.slope * x;
  T y = e * multiply - g.floor * weight - onehot;
  if (softcap != 0) {
    const T ratio = z / softcap;
    y *= 1 - ratio * ratio;
  }
  return y;
}

// Writes the gradient of a row. Before a call, a barrier follows the writing of `second`.
template <bool kAll, class In, class Out, bool kRagged>
__device__ void write_gradient(const Row<In, kRagged>& row, const Gradient<Compute<In>>& g,
                               const Place<Out, Row<In, kRagged>, kRagged>& place,
                               Second<Compute<In>>& second) {
  using T = Compute<In>;
  // With kAll the code of the loop is longer, so the loop is unrolled over fewer vectors.
  constexpr int kTogether = kAll && kUnroll < In >> 2 ? 2 : kUnroll<In>;
  const int vectors = row.vectors(), tile = blockDim.x * kTogether;
  // Few rows have a second target, so the loop does not know it. Thread 0 computes its element before the
  // loop and stores it after the loop.
  if (threadIdx.x == 0 && second.at >= 0) {
    const T weight = kAll && row.class_weights != nullptr ? row.class_weights[second.at] : 1;
    const T y = derivative<kAll>(g, row.softcap, second.value, weight, g.onehot2);
    if (kAll && !kRagged && g.live != nullptr && !(y < g.least && -y < g.least))
      atomicOr(g.live + second.at / kVector<In>, 1u << (8 * (second.at % kVector<In>)));
    second.value = y;
  }
  for (int n = 0; n * tile < vectors; ++n) {
    typename Row<In, kRagged>::Raw raw[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int v =
          vectors - 1 - (n * tile + j * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x));
      if (v >= 0) raw[j] = row.raw(v);
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int v =
          vectors - 1 - (n * tile + j * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x));
      if (v < 0) break;
      const auto z = row.finish(raw[j], v);
      const auto w = row.weights(v);
      const int at =
          v == (g.target + row.before()) / kVector<In> ? (g.target + row.before()) % kVector<In> : -1;
      Vector<Out, kVector<In>> result;
      unsigned marks = 0;
#pragma unroll
      for (int i = 0; i < kVector<In>; ++i) {
        const T y = derivative<kAll>(g, row.softcap, z[i], w[i], i == at ? g.onehot : T{0});
        result[i] = narrow<Out>(y);
        if (kAll && !kRagged && !(y < g.least && -y < g.least)) marks |= 1u << (8 * i);
      }
      if (kAll && !kRagged && g.live != nullptr && marks != 0) atomicOr(g.live + v, marks);
      place.put(row, v, result);
    }
  }
  if (second.at < 0) return;
  __syncthreads();
  if (threadIdx.x == 0) place.to[second.at + row.before()] = narrow<Out>(second.value);
}

}  // namespace
}  // namespace shoestring::cuda
