#pragma once

// Code of the rotary embedding's kernels: one head of queries or keys, the pairs of elements that are
// rotated, and the team of lanes that computes a head.

#include "cuda/core/convert.h"
#include "cuda/core/vector.h"
#include "cuda/core/warp.h"
#include "layers/rope_table.h"

namespace shoestring::cuda {
namespace {

using kernels::HeadStrides;
using kernels::Rope;
using kernels::RopeHeads;

constexpr int kWarps = 4;  // warps per block

// Returns entry i of a table of cosines or sines. `bits` is Rope::table_bits.
__device__ inline float angle(const void* table, int bits, int64_t i) {
  if (bits == 32) return static_cast<const float*>(table)[i];
  if (bits == 16) return to_float(static_cast<const __nv_bfloat16*>(table)[i]);
  return to_float(static_cast<const __half*>(table)[i]);
}

// One head of a token. `index` numbers all heads: token after token, and within a token the query heads
// before the key heads.
template <class T>
struct Head {
  const RopeHeads& of;
  // row: offset of the token's row in the tables of cosines and sines, or -1 if the token's position is
  // invalid
  int64_t batch, token, head, row;
  bool key;

  __device__ Head(const Rope& rope, int64_t index)
      : of(rope.sides[index % heads(rope) >= rope.sides[0].heads]) {
    head = index % heads(rope);
    key = head >= rope.sides[0].heads;
    if (key) head -= rope.sides[0].heads;
    token = index / heads(rope) % rope.tokens;
    batch = index / heads(rope) / rope.tokens;
    if (rope.positions == nullptr) {
      row = batch * rope.table_batch + token * rope.table_token;
    } else {
      const int64_t position = rope.positions[batch * rope.position_batch + token * rope.position_token];
      row = position >= 0 && position < rope.table_rows ? position * rope.table_token : -1;
    }
  }
  __device__ static int64_t heads(const Rope& rope) { return rope.sides[0].heads + rope.sides[1].heads; }
  __device__ int64_t at(const HeadStrides& s) const {
    return batch * s.batch + head * s.head + token * s.token;
  }
  __device__ const T* x() const { return static_cast<const T*>(of.x) + at(of.x_strides); }
  __device__ const T* grad() const { return static_cast<const T*>(of.grad) + at(of.grad_strides); }
  __device__ T* out() const { return static_cast<T*>(of.out) + at(of.out_strides); }
};

// Returns the index in a head of the first, or second, element of pair p.
__device__ inline int first_of(const Rope& rope, int p) { return rope.interleaved ? 2 * p : p; }
__device__ inline int second_of(const Rope& rope, int p) {
  return rope.interleaved ? 2 * p + 1 : p + static_cast<int>(rope.rotary_dim / 2);
}

template <int N>
struct Pairs {
  float first[N], second[N];
};

// Loads, or stores, N pairs of elements that are rotated together. The two elements of a pair are adjacent
// (interleaved), or rotary_dim / 2 apart.
template <int N, class T>
__device__ Pairs<N> get(const Rope& rope, const T* x, int p) {
  Pairs<N> pairs;
  if (N == 1) return {{to_float(x[first_of(rope, p)])}, {to_float(x[second_of(rope, p)])}};
  if (rope.interleaved) {
    const auto v = load<2 * N>(x + 2 * p);
#pragma unroll
    for (int k = 0; k < N; ++k) pairs.first[k] = to_float(v[2 * k]), pairs.second[k] = to_float(v[2 * k + 1]);
  } else {
    const auto a = load<N>(x + p), b = load<N>(x + rope.rotary_dim / 2 + p);
#pragma unroll
    for (int k = 0; k < N; ++k) pairs.first[k] = to_float(a[k]), pairs.second[k] = to_float(b[k]);
  }
  return pairs;
}
template <int N, class T>
__device__ void put(const Rope& rope, T* y, int p, const Pairs<N>& pairs) {
  Vector<T, N> a, b;
  Vector<T, 2 * N> v;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    a[k] = v[2 * k] = rounded<T>(pairs.first[k]);
    b[k] = v[2 * k + 1] = rounded<T>(pairs.second[k]);
  }
  if (N == 1) {
    y[first_of(rope, p)] = a[0];
    y[second_of(rope, p)] = b[0];
    return;
  }
  if (rope.interleaved) return store(y + 2 * p, v);
  store(y + p, a);
  store(y + rope.rotary_dim / 2 + p, b);
}

template <int N>
__device__ Pairs<N> rotated(const Rope& rope, int64_t row, int p, float sign, const Pairs<N>& from) {
  Pairs<N> to;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const int64_t i = row + (p + k) * rope.table_step;
    const float cos = row < 0 ? NAN : angle(rope.cos, rope.table_bits, i);
    const float sin = row < 0 ? NAN : sign * angle(rope.sin, rope.table_bits, i);
    to.first[k] = from.first[k] * cos - from.second[k] * sin;
    to.second[k] = from.second[k] * cos + from.first[k] * sin;
  }
  return to;
}

// The team of lanes that computes a head. Its size is a power of two. A team that is not busy has no head,
// but its lanes still take part in the shuffles of the warp.
struct Team {
  int size;
  bool busy;

  __device__ int member() const { return lane() % size; }
  // Returns the index of this team in the grid.
  __device__ int64_t index() const { return (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / size; }
  // Returns the index of the first team of this warp.
  __device__ int64_t first() const { return (int64_t{blockIdx.x} * kWarps + warp()) * (kWarp / size); }

  __device__ float sum(float x) const {
    for (int offset = size / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
    return x;
  }
  // Calls body(p) for each group of N pairs that this lane rotates, where p is the group's first pair. Then
  // calls rest(i) for each element i of this lane that is not rotated.
  template <int N, class Body, class Rest>
  __device__ void sweep(const Rope& rope, Body body, Rest rest) const {
    const int half = busy ? static_cast<int>(rope.rotary_dim / 2) : 0,
              end = busy ? static_cast<int>(rope.head_dim) : 0;
#pragma unroll 1
    for (int p = member() * N; p < half; p += size * N) body(p);
#pragma unroll 1
    for (int i = 2 * half + member(); i < end; i += size) rest(i);
  }
};

// Returns the factor of element i of a head in the norm: the weight plus the offset.
template <class T>
__device__ float factor(const Rope& rope, const void* weight, int i) {
  return rope.offset + (rope.wide_weight ? static_cast<const float*>(weight)[i]
                                         : to_float(static_cast<const T*>(weight)[i]));
}

}  // namespace
}  // namespace shoestring::cuda
