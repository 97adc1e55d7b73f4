// Rotary embedding on CUDA, optionally with an RMS norm of each head before it. A team of lanes computes one
// head of one token, with any strides. The team has one lane for each 16-byte vector in the first half of a
// head. With a norm, the team reads the head twice, the second time from L1. The heads of a token are
// computed one after the other, so the token's cosines and sines stay in L1, too. Without a norm, q and k are
// not saved, because backward is the inverse rotation of the gradient.

#include "core/cuda_tables.h"
#include "cuda/core/launch.h"
#include "cuda/layers/rope.h"

namespace shoestring::cuda {
namespace {

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

// Backward of the rotation, and of the RMS norm before it. With h the normalised head, d the gradient rotated
// back and g = d * weight, grad_x is rstd * (g - h * mean(g * h)). The gradient of the weight is the sum of d
// * h over all heads. With n teams, each team computes every n-th head. A team has its own sums of d * h, for
// queries and for keys, in shared memory.
// Budget: 128 registers, 0 bytes shared, no spills.
template <class T, int N>
__global__ void __launch_bounds__(kWarps* kWarp, 4)
    backward(Rope rope, int team_size, int64_t count, int64_t teams, float* grad_weights) {
  Team team{team_size};
  const int64_t self = team.index();
  team.busy = self < teams;
  float* sums = reinterpret_cast<float*>(dynamic_shared()) + threadIdx.x / team_size * 2 * rope.head_dim;
  // A lane has elements with the same indices in every head, so no other lane reads or writes its sums.
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
    const float size = static_cast<float>(rope.head_dim),
                rstd = 1 / sqrtf(team.sum(squares) / size + rope.eps);
    const float slope = team.sum(along) * rstd / size;
    float* head_sums = sums + (head.key ? rope.head_dim : 0);
    const auto one = [&](float v, float d, int i) {
      const float h = v * rstd;
      if (grad_weights != nullptr) head_sums[i] += d * h;
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

// Returns whether the heads of all tensors, and the halves of heads, are aligned for accesses to `width`
// elements. One access takes at most 16 bytes.
template <class T>
bool vectors(const Rope& rope, int width) {
  const int bytes = width * static_cast<int>(sizeof(T)) < 16 ? width * static_cast<int>(sizeof(T)) : 16;
  const auto even = [&](const void* p, const HeadStrides& s) {
    return p == nullptr ||
           (aligned(p, bytes) && s.batch % width == 0 && s.head % width == 0 && s.token % width == 0);
  };
  bool all = rope.rotary_dim / 2 % width == 0;
  for (const RopeHeads& of : rope.sides) {
    all = all && even(of.x, of.x_strides) && even(of.grad, of.grad_strides) && even(of.out, of.out_strides);
  }
  return all;
}

// Returns the number of lanes in a team, a power of two. Each lane handles `width` pairs of a head at a time.
int team_size(const Rope& rope, int width) {
  int size = 1;
  while (size < kWarp && size * width * 2 < rope.head_dim) size *= 2;
  return size;
}

int64_t count_of(const Rope& rope, int64_t batches) {
  return batches * rope.tokens * (rope.sides[0].heads + rope.sides[1].heads);
}
int64_t blocks(int64_t teams, int size) { return (teams * size + kWarps * kWarp - 1) / (kWarps * kWarp); }

template <class T>
const char* run_forward(const Rope& rope, int64_t batches, void* stream) {
  constexpr int kVector = 16 / sizeof(T);
  const bool whole = vectors<T>(rope, kVector);
  const int size = team_size(rope, whole ? kVector : 1);
  const int64_t count = count_of(rope, batches);
  return launch(whole ? forward<T, kVector> : forward<T, 1>, blocks(count, size), kWarps * kWarp, 0, stream,
                rope, size, count);
}

template <class T>
const char* run_backward(const Rope& rope, int64_t batches, int64_t parts, float* grad_weights,
                         void* stream) {
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
