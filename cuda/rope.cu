// A team of lanes, as many as have a vector of 16 bytes each of a head's first half, takes a head of a token, wherever its
// strides put that, and with a norm reads it twice, the second time from L1. The heads of a token follow each other, so its
// angles stay in L1 too. Without a norm nothing of q and k is kept: the gradient's way is the rotation back.

#include "common/convert.h"
#include "common/launch.h"
#include "common/vector.h"
#include "common/warp.h"
#include "kernels/cuda.h"
#include "kernels/rope.h"

namespace shoestring::cuda {
namespace {

using kernels::HeadStrides;
using kernels::Rope;
using kernels::RopeHeads;

constexpr int kWarps = 4;  // of a block

__device__ inline float angle(const void* table, int bits, int64_t i) {
  if (bits == 32) return static_cast<const float*>(table)[i];
  if (bits == 16) return to_float(static_cast<const __nv_bfloat16*>(table)[i]);
  return to_float(static_cast<const __half*>(table)[i]);
}

// A head of a token: the index-th of all heads of queries and keys, token by token.
template <class T>
struct Head {
  const RopeHeads& of;
  int64_t batch, token, head, row;  // row: where the token's angles begin, negative where there are none
  bool key;

  __device__ Head(const Rope& rope, int64_t index) : of(rope.sides[index % heads(rope) >= rope.sides[0].heads]) {
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
  __device__ int64_t at(const HeadStrides& s) const { return batch * s.batch + head * s.head + token * s.token; }
  __device__ const T* x() const { return static_cast<const T*>(of.x) + at(of.x_strides); }
  __device__ const T* grad() const { return static_cast<const T*>(of.grad) + at(of.grad_strides); }
  __device__ T* out() const { return static_cast<T*>(of.out) + at(of.out_strides); }
};

// The place in a head of the first and the second of pair p.
__device__ inline int first_of(const Rope& rope, int p) { return rope.interleaved ? 2 * p : p; }
__device__ inline int second_of(const Rope& rope, int p) {
  return rope.interleaved ? 2 * p + 1 : p + static_cast<int>(rope.rotary_dim / 2);
}

template <int N>
struct Pairs {
  float first[N], second[N];
};

// N pairs of a rotation as they lie in memory: neighbours, or rotary_dim / 2 apart.
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

// Lanes that have a head, a power of two of them; an idle team goes along with its warp.
struct Team {
  int size;
  bool busy;

  __device__ int member() const { return lane() % size; }
  // Of this team among all.
  __device__ int64_t index() const { return (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / size; }
  // Of the first team of this warp.
  __device__ int64_t first() const { return (int64_t{blockIdx.x} * kWarps + warp()) * (kWarp / size); }

  __device__ float sum(float x) const {
    for (int offset = size / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
    return x;
  }
  // body(p) for the first of each N pairs, and then rest(i) for each element that is not turned.
  template <int N, class Body, class Rest>
  __device__ void sweep(const Rope& rope, Body body, Rest rest) const {
    const int half = busy ? static_cast<int>(rope.rotary_dim / 2) : 0, end = busy ? static_cast<int>(rope.head_dim) : 0;
#pragma unroll 1
    for (int p = member() * N; p < half; p += size * N) body(p);
#pragma unroll 1
    for (int i = 2 * half + member(); i < end; i += size) rest(i);
  }
};

template <class T>
__device__ float factor(const Rope& rope, const void* weight, int i) {
  return rope.offset + (rope.wide_weight ? static_cast<const float*>(weight)[i] : to_float(static_cast<const T*>(weight)[i]));
}

// Budget: 64 registers, 0 bytes shared, no spills.
template <class T, int N>
__global__ void __launch_bounds__(kWarps* kWarp) forward(Rope rope, int team_size, int64_t count) {
  Team team{team_size};
  team.busy = team.index() < count;
  const Head<T> head(rope, team.busy ? team.index() : 0);
  const T* x = head.x();
  T* y = head.out();
  const void* weight = head.of.weight;
  float rstd = 1;
  if (weight != nullptr) {
    float squares = 0;
    team.sweep<N>(
        rope,
        [&](int p) {
          const auto v = get<N>(rope, x, p);
#pragma unroll
          for (int k = 0; k < N; ++k) squares += v.first[k] * v.first[k] + v.second[k] * v.second[k];
        },
        [&](int i) { squares += to_float(x[i]) * to_float(x[i]); });
    rstd = 1 / sqrtf(team.sum(squares) / static_cast<float>(rope.head_dim) + rope.eps);
  }
  team.sweep<N>(
      rope,
      [&](int p) {
        auto v = get<N>(rope, x, p);
        if (weight != nullptr) {
#pragma unroll
          for (int k = 0; k < N; ++k) {
            v.first[k] *= rstd * factor<T>(rope, weight, first_of(rope, p + k));
            v.second[k] *= rstd * factor<T>(rope, weight, second_of(rope, p + k));
          }
        }
        put(rope, y, p, rotated(rope, head.row, p, 1.f, v));
      },
      [&](int i) {
        y[i] = weight == nullptr ? x[i] : rounded<T>(to_float(x[i]) * rstd * factor<T>(rope, weight, i));
      });
}

// With h the normalised head, d the gradient turned back and g = d * weight: rstd (g - h mean(g h)); d h is the weight's. A
// team takes every teams-th head, and has room for its sums of d h, queries' and keys'.
// Budget: 128 registers, 0 bytes shared, no spills.
template <class T, int N>
__global__ void __launch_bounds__(kWarps* kWarp, 4) backward(Rope rope, int team_size, int64_t count, int64_t teams,
                                                          float* grad_weights) {
  Team team{team_size};
  const int64_t self = team.index();
  team.busy = self < teams;
  float* sums = reinterpret_cast<float*>(dynamic_shared()) + threadIdx.x / team_size * 2 * rope.head_dim;
  // The elements of a lane are the same in every head: nobody else reads or writes its sums.
  const auto each_sum = [&](auto body) {
    team.sweep<N>(
        rope,
        [&](int p) {
#pragma unroll
          for (int k = 0; k < N; ++k) body(first_of(rope, p + k)), body(second_of(rope, p + k));
        },
        body);
  };
  if (grad_weights != nullptr) each_sum([&](int i) { sums[i] = sums[i + rope.head_dim] = 0; });
  const bool has_room = team.busy;
  for (int64_t index = self, first = team.first(); first < count; index += teams, first += teams) {
    team.busy = has_room && index < count;
    const Head<T> head(rope, team.busy ? index : 0);
    const T* grad = head.grad();
    T* grad_x = head.out();
    const void* weight = head.of.weight;
    if (weight == nullptr) {
      team.sweep<N>(
          rope, [&](int p) { put(rope, grad_x, p, rotated(rope, head.row, p, -1.f, get<N>(rope, grad, p))); },
          [&](int i) { grad_x[i] = grad[i]; });
      continue;
    }
    const T* x = head.x();
    float squares = 0, along = 0;
    team.sweep<N>(
        rope,
        [&](int p) {
          const auto v = get<N>(rope, x, p), d = rotated(rope, head.row, p, -1.f, get<N>(rope, grad, p));
#pragma unroll
          for (int k = 0; k < N; ++k) {
            squares += v.first[k] * v.first[k] + v.second[k] * v.second[k];
            along += v.first[k] * d.first[k] * factor<T>(rope, weight, first_of(rope, p + k)) +
                     v.second[k] * d.second[k] * factor<T>(rope, weight, second_of(rope, p + k));
          }
        },
        [&](int i) {
          squares += to_float(x[i]) * to_float(x[i]);
          along += to_float(x[i]) * to_float(grad[i]) * factor<T>(rope, weight, i);
        });
    const float size = static_cast<float>(rope.head_dim), rstd = 1 / sqrtf(team.sum(squares) / size + rope.eps);
    const float slope = team.sum(along) * rstd / size;
    float* own = sums + (head.key ? rope.head_dim : 0);
    const auto one = [&](float v, float d, int i) {
      const float h = v * rstd;
      if (grad_weights != nullptr) own[i] += d * h;
      return rstd * (d * factor<T>(rope, weight, i) - h * slope);
    };
    team.sweep<N>(
        rope,
        [&](int p) {
          auto v = get<N>(rope, x, p);
          const auto d = rotated(rope, head.row, p, -1.f, get<N>(rope, grad, p));
#pragma unroll
          for (int k = 0; k < N; ++k) {
            v.first[k] = one(v.first[k], d.first[k], first_of(rope, p + k));
            v.second[k] = one(v.second[k], d.second[k], second_of(rope, p + k));
          }
          put(rope, grad_x, p, v);
        },
        [&](int i) { grad_x[i] = rounded<T>(one(to_float(x[i]), to_float(grad[i]), i)); });
  }
  team.busy = has_room;
  if (grad_weights == nullptr) return;
  grad_weights += self * 2 * rope.head_dim;
  each_sum([&](int i) {
    grad_weights[i] = sums[i];
    grad_weights[i + rope.head_dim] = sums[i + rope.head_dim];
  });
}

// Whether every head begins, and its halves do, where vectors of `width` elements may, whose bytes are at most 16.
template <class T>
bool vectors(const Rope& rope, int width) {
  const int bytes = width * static_cast<int>(sizeof(T)) < 16 ? width * static_cast<int>(sizeof(T)) : 16;
  const auto even = [&](const void* p, const HeadStrides& s) {
    return p == nullptr || (aligned(p, bytes) && s.batch % width == 0 && s.head % width == 0 && s.token % width == 0);
  };
  bool all = rope.rotary_dim / 2 % width == 0;
  for (const RopeHeads& of : rope.sides) {
    all = all && even(of.x, of.x_strides) && even(of.grad, of.grad_strides) && even(of.out, of.out_strides);
  }
  return all;
}

// Lanes that have `width` pairs each of a head.
int team_size(const Rope& rope, int width) {
  int size = 1;
  while (size < kWarp && size * width * 2 < rope.head_dim) size *= 2;
  return size;
}

int64_t count_of(const Rope& rope, int64_t batches) { return batches * rope.tokens * (rope.sides[0].heads + rope.sides[1].heads); }
int64_t blocks(int64_t teams, int size) { return (teams * size + kWarps * kWarp - 1) / (kWarps * kWarp); }

template <class T>
const char* run_forward(const Rope& rope, int64_t batches, void* stream) {
  constexpr int kVector = 16 / sizeof(T);
  const bool whole = vectors<T>(rope, kVector);
  const int size = team_size(rope, whole ? kVector : 1);
  const int64_t count = count_of(rope, batches);
  return launch(whole ? forward<T, kVector> : forward<T, 1>, blocks(count, size), kWarps * kWarp, 0, stream, rope, size, count);
}

template <class T>
const char* run_backward(const Rope& rope, int64_t batches, int64_t parts, float* grad_weights, void* stream) {
  constexpr int kVector = 16 / sizeof(T);
  const bool whole = vectors<T>(rope, kVector);
  const int size = team_size(rope, whole ? kVector : 1);
  const int64_t count = count_of(rope, batches), teams = grad_weights == nullptr ? count : parts;
  const auto bytes = static_cast<int>(kWarps * kWarp / size * 2 * rope.head_dim * sizeof(float));
  return launch(whole ? backward<T, kVector> : backward<T, 1>, blocks(teams, size), kWarps * kWarp,
                grad_weights == nullptr ? 0 : bytes, stream, rope, size, count, teams, grad_weights);
}

const kernels::RopeCuda kTable{run_forward<float>,  run_forward<__nv_bfloat16>,  run_forward<__half>,
                               run_backward<float>, run_backward<__nv_bfloat16>, run_backward<__half>};
const bool kProvided = (provide("rope", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
