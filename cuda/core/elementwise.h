#pragma once

// CUDA kernels of elementwise operators (core/elementwise_table.h). Memory bandwidth limits them, so a thread
// reads 16 bytes of each input.

#include "core/cuda_tables.h"
#include "core/elementwise_table.h"
#include "cuda/core/convert.h"
#include "cuda/core/elementwise_math.h"
#include "cuda/core/launch.h"
#include "cuda/core/vector.h"

namespace shoestring::cuda {
namespace {

constexpr int kThreads = 256;

template <class T, int kCount>
struct Arrays {
  T* at[kCount];
};

// Reads or writes elements [i, i + N) of an array of `count` elements, except those after the end of the
// array. N is 1 if one of the arrays does not begin at a multiple of 16 bytes.
template <int N, class T>
__device__ Vector<T, N> read(const T* x, int64_t i, int64_t count) {
  if (i + N <= count) return load<N>(x + i);
  Vector<T, N> v;
#pragma unroll
  for (int k = 0; k < N; ++k) v[k] = i + k < count ? x[i + k] : rounded<T>(0.f);
  return v;
}
template <int N, class T>
__device__ void write(T* x, int64_t i, int64_t count, const Vector<T, N>& v) {
  if (i + N <= count) return store(x + i, v);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (i + k < count) x[i + k] = v[k];
  }
}

/// Applies the rule, or its derivative, to the N elements of a thread. The last threads may have fewer.
template <bool kBackward, int kAlways, class Rule, class T, int N, int kIn, int kOut>
__device__ void run_rule(const Rule& rule, const Arrays<const T, kIn>& in, int64_t count,
                         const Arrays<T, kOut>& out) {
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * N;
  if (i >= count) return;
  Vector<T, N> x[kIn], y[kOut];
#pragma unroll
  for (int a = 0; a < kIn; ++a) x[a] = read<N>(in.at[a], i, count);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    float from[kIn], to[kOut];
#pragma unroll
    for (int a = 0; a < kIn; ++a) from[a] = to_float(x[a][k]);
    if constexpr (kBackward) {
      rule.backward(from, to, ElementwiseMath());
    } else {
      rule.forward(from, to, ElementwiseMath());
    }
#pragma unroll
    for (int a = 0; a < kOut; ++a) y[a][k] = rounded<T>(to[a]);
  }
#pragma unroll
  for (int a = 0; a < kOut; ++a) {
    if (a < kAlways || out.at[a] != nullptr) write(out.at[a], i, count, y[a]);
  }
}

// Budget: 64 registers, 0 bytes shared, no spills.
template <class Rule, class T, int N>
__global__ void __launch_bounds__(kThreads)
    forward(Rule rule, Arrays<const T, Rule::kInputs> in, int64_t count, Arrays<T, 1> out) {
  run_rule<false, 1, Rule, T, N>(rule, in, count, out);
}

// Budget: 72 registers, 0 bytes shared, no spills.
template <class Rule, class T, int N>
__global__ void __launch_bounds__(kThreads)
    backward(Rule rule, Arrays<const T, Rule::kInputs + 1> in, int64_t count, Arrays<T, Rule::kOutputs> out) {
  run_rule<true, Rule::kInputs, Rule, T, N>(rule, in, count, out);
}

template <bool kBackward, class Rule, class T, int N>
const char* start(const void* rule, const void* const* from, int64_t count, void* const* to, void* stream) {
  constexpr int kIn = Rule::kInputs + kBackward, kOut = kBackward ? Rule::kOutputs : 1;
  Arrays<const T, kIn> in;
  Arrays<T, kOut> out;
  for (int k = 0; k < kIn; ++k) in.at[k] = static_cast<const T*>(from[k]);
  for (int k = 0; k < kOut; ++k) out.at[k] = static_cast<T*>(to[k]);
  constexpr int64_t kTile = int64_t{kThreads} * N;
  const Rule typed_rule = kernels::rule_at<Rule>(rule);
  if constexpr (kBackward) {
    return launch(backward<Rule, T, N>, (count + kTile - 1) / kTile, kThreads, 0, stream, typed_rule, in,
                  count, out);
  } else {
    return launch(forward<Rule, T, N>, (count + kTile - 1) / kTile, kThreads, 0, stream, typed_rule, in,
                  count, out);
  }
}

/// Starts the kernel that loads 16 bytes at a time if the alignment of all tensors allows it.
template <bool kBackward, class Rule, class T>
const char* run(const void* rule, const void* const* in, int64_t count, void* const* out, void* stream) {
  bool vectors = true;
  for (int k = 0; k < Rule::kInputs + kBackward; ++k) vectors = vectors && aligned(in[k]);
  for (int k = 0; k < (kBackward ? Rule::kOutputs : 1); ++k)
    vectors = vectors && aligned(out[k]);  // a null pointer counts as aligned
  const auto chosen = vectors ? start<kBackward, Rule, T, 16 / sizeof(T)> : start<kBackward, Rule, T, 1>;
  return chosen(rule, in, count, out, stream);
}

template <class Rule>
constexpr kernels::ElementwiseCuda elementwise_table() {
  return {{run<false, Rule, float>, run<false, Rule, __nv_bfloat16>, run<false, Rule, __half>},
          {run<true, Rule, float>, run<true, Rule, __nv_bfloat16>, run<true, Rule, __half>}};
}

}  // namespace
}  // namespace shoestring::cuda
