// Routing of mixtures of experts on CUDA. A warp routes a token: each lane has every 32nd expert. The keys of
// the experts are in shared memory, as integers of the same order, and the best ones are taken one by one.
// Sums over tokens have a fixed order: a warp adds up a part of the tokens, and one block adds up the parts.
// csrc/experts/moe_route_table.h has the formulas.

#include <cmath>

#include "core/cuda_tables.h"
#include "cuda/core/convert.h"
#include "cuda/experts/warps.h"
#include "experts/moe_route_table.h"

namespace shoestring::cuda {
namespace {

using kernels::Route;
using kernels::RouteBackward;
using kernels::RouteForward;
using kernels::RouteParts;
using kernels::RouteScore;

constexpr int kFinishThreads = 256;

__device__ inline float warp_sum(float x) {
  return warp_reduce(x, [](float a, float b) { return a + b; });
}
__device__ inline float warp_largest(float x) {
  return warp_reduce(x, [](float a, float b) { return fmaxf(a, b); });
}

// Returns an integer above 0 that has the order of the numbers, with NaN as the largest. -0 equals 0.
__device__ inline unsigned ordered(float x) {
  if (x != x) return 0xffffffffu;
  const unsigned bits = __float_as_uint(x + 0.f);
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}
__device__ inline float number_of(unsigned key) {
  return __uint_as_float(key >> 31 != 0 ? key & 0x7fffffffu : ~key);
}

// Returns the index of the largest key, the lowest one among equals, and sets this key to 0.
__device__ inline int take_best(unsigned* keys, int count) {
  unsigned long long best = 0;
  for (int i = lane(); i < count; i += kWarp) {
    const unsigned long long next = static_cast<unsigned long long>(keys[i]) << 32 | (0xffffffffu - i);
    if (next > best) best = next;
  }
  best = warp_reduce(best, [](unsigned long long a, unsigned long long b) { return a > b ? a : b; });
  const auto index = static_cast<int>(0xffffffffu - static_cast<unsigned>(best));
  __syncwarp();
  if (lane() == 0) keys[index] = 0;
  __syncwarp();
  return index;
}

struct Sigmoid {
  float value, rest;  // rest is 1 - value without cancellation
};
__device__ inline Sigmoid sigmoid_of(float x) {
  const float e = expf(-fabsf(x)), more = 1 / (1 + e), less = e / (1 + e);
  return x >= 0 ? Sigmoid{more, less} : Sigmoid{less, more};
}

// A token's row of logits, and its sums over all experts.
template <class T>
struct Token {
  const T* logits;
  float largest, sum, sigmoids;

  __device__ Token(const Route& route, const T* logits)
      : logits(logits), largest(-INFINITY), sum(0), sigmoids(0) {
    const int n = static_cast<int>(route.experts);
    for (int e = lane(); e < n; e += kWarp) largest = fmaxf(largest, logit(e));
    largest = warp_largest(largest);
    for (int e = lane(); e < n; e += kWarp) {
      sum += expf(logit(e) - largest);
      if (route.score == RouteScore::kSigmoid) sigmoids += sigmoid_of(logit(e)).value;
    }
    sum = warp_sum(sum);
    sigmoids = warp_sum(sigmoids);
  }
  __device__ float logit(int64_t e) const { return to_float(logits[e]); }
  __device__ float share(int64_t e) const { return expf(logit(e) - largest) / sum; }
  __device__ float log_sum() const { return largest + logf(sum); }
};

__device__ inline bool is_softmax_of_chosen(const Route& route) {
  return route.score == RouteScore::kTopkSoftmax ||
         (route.score == RouteScore::kSoftmax && route.renormalize);
}

// The weights of a token's chosen experts, without the scale.
template <class T>
struct Weights {
  const Token<T>& of;
  RouteScore score;
  bool softmax;
  float largest, divisor;  // the largest chosen logit, and the sum that divides the weights

  __device__ Weights(const Route& route, const Token<T>& of, const int64_t* index)
      : of(of), score(route.score), softmax(is_softmax_of_chosen(route)), largest(-INFINITY), divisor(1) {
    const int k = static_cast<int>(route.top_k);
    float sum = 0;
    if (softmax) {
      for (int i = lane(); i < k; i += kWarp) largest = fmaxf(largest, of.logit(index[i]));
      largest = warp_largest(largest);
      for (int i = lane(); i < k; i += kWarp) sum += expf(of.logit(index[i]) - largest);
      divisor = warp_sum(sum);
    } else if (route.renormalize) {
      for (int i = lane(); i < k; i += kWarp) sum += sigmoid_of(of.logit(index[i])).value;
      divisor = warp_sum(sum) + kernels::kLeastSum;
    }
  }
  __device__ float operator()(int64_t e) const {
    if (softmax) return expf(of.logit(e) - largest) / divisor;
    return score == RouteScore::kSigmoid ? sigmoid_of(of.logit(e)).value / divisor : of.share(e);
  }
};

// Sets the keys of experts to 0 whose groups are not among the best ones.
__device__ inline void limit_groups(const Route& route, unsigned* keys, unsigned* groups) {
  const int count = static_cast<int>(route.groups), n = static_cast<int>(route.experts), size = n / count;
  for (int group = lane(); group < count; group += kWarp) {
    unsigned first = keys[group * size], second = 0;
    for (int e = 1; e < size; ++e) {
      const unsigned next = keys[group * size + e];
      second = next > first ? first : next > second ? next : second;
      first = next > first ? next : first;
    }
    groups[group] = ordered(size == 1 ? number_of(first) : number_of(first) + number_of(second));
  }
  __syncwarp();
  for (int i = 0; i < route.top_groups; ++i) take_best(groups, count);
  for (int e = lane(); e < n; e += kWarp) {
    if (groups[e / size] != 0) keys[e] = 0;  // the best groups were taken
  }
  __syncwarp();
}

// Budget: 96 registers, 0 bytes shared, no spills.
template <class T>
__global__ void __launch_bounds__(kExpertWarps* kWarp, 4)
    route_tokens(Route route, RouteForward io, int64_t rows, RouteParts sums) {
  const int64_t part = warp_of_launch();
  if (part >= sums.parts) return;  // all lanes of a warp have the same part
  const int n = static_cast<int>(route.experts), k = static_cast<int>(route.top_k);
  auto* keys = shared_of_warp<unsigned>(int64_t{4} * n);
  unsigned* groups = keys + n;
  auto* shares = reinterpret_cast<float*>(groups + n);
  auto* counts = reinterpret_cast<int*>(shares + n);
  for (int e = lane(); e < n; e += kWarp) {
    shares[e] = 0;
    counts[e] = 0;
  }
  const bool limited = route.top_groups < route.groups, plain = io.bias == nullptr && !limited;
  float squares = 0;
  for (int64_t row = part; row < rows; row += sums.parts) {
    int64_t* index = io.index + row * k;
    T* weight = static_cast<T*>(io.weight) + row * k;
    if (io.mask != nullptr && !io.mask[row]) {
      for (int i = lane(); i < k; i += kWarp) {
        index[i] = -1;
        weight[i] = rounded<T>(0.f);
      }
      continue;
    }
    const Token<T> token(route, static_cast<const T*>(io.logits) + row * n);
    __syncwarp();
    for (int e = lane(); e < n; e += kWarp) {
      const float l = token.logit(e), p = token.share(e);
      const float s = route.score == RouteScore::kSigmoid ? sigmoid_of(l).value : p;
      shares[e] += route.score == RouteScore::kSigmoid ? s / token.sigmoids : p;
      const float score = plain || route.score == RouteScore::kTopkSoftmax ? l : s;
      keys[e] = ordered(io.bias == nullptr ? score : score + io.bias[e]);
    }
    __syncwarp();
    if (limited) limit_groups(route, keys, groups);
    for (int i = 0; i < k; ++i) {
      const int best = take_best(keys, n);
      if (lane() == 0) {
        index[i] = best;
        ++counts[best];
      }
    }
    __syncwarp();
    const Weights<T> weights(route, token, index);
    for (int i = lane(); i < k; i += kWarp) weight[i] = rounded<T>(weights(index[i]) * route.scale);
    const float lse = token.log_sum();
    squares += lse * lse;
  }
  __syncwarp();
  for (int e = lane(); e < n; e += kWarp) {
    sums.shares[part * n + e] = shares[e];
    sums.counts[part * n + e] = counts[e];
  }
  if (lane() == 0) sums.squares[part] = squares;
}

// Returns the sum of x over the threads of the block, to every thread. `slots` has an element per thread.
__device__ inline double block_sum(double x, double* slots) {
  const auto thread = static_cast<int>(threadIdx.x);
  slots[thread] = x;
  __syncthreads();
  for (int half = kFinishThreads / 2; half > 0; half /= 2) {
    if (thread < half) slots[thread] += slots[thread + half];
    __syncthreads();
  }
  const double sum = slots[0];
  __syncthreads();
  return sum;
}

// Budget: 64 registers, 2048 bytes shared, no spills.
__global__ void __launch_bounds__(kFinishThreads)
    finish_route(Route route, RouteParts sums, int64_t* counts, float* balance, float* z) {
  __shared__ double slots[kFinishThreads];
  double imbalance = 0, chosen = 0, squares = 0;
  for (int64_t e = threadIdx.x; e < route.experts; e += kFinishThreads) {
    double share = 0;
    int64_t count = 0;
    for (int64_t part = 0; part < sums.parts; ++part) {
      share += static_cast<double>(sums.shares[part * route.experts + e]);
      count += sums.counts[part * route.experts + e];
    }
    counts[e] = count;
    imbalance += static_cast<double>(count) * share;
    chosen += static_cast<double>(count);
  }
  for (int64_t part = threadIdx.x; part < sums.parts; part += kFinishThreads)
    squares += static_cast<double>(sums.squares[part]);
  imbalance = block_sum(imbalance, slots);
  chosen = block_sum(chosen, slots);
  squares = block_sum(squares, slots);
  if (threadIdx.x != 0) return;
  const double tokens = chosen > 0 ? chosen / static_cast<double>(route.top_k) : 1;
  *balance = static_cast<float>(imbalance * static_cast<double>(route.experts) / (tokens * tokens));
  *z = static_cast<float>(squares / tokens);
}

// Returns the number of tokens that count, at least 1.
__device__ inline float tokens_of(const Route& route, const int64_t* counts) {
  int64_t chosen = 0;
  for (int64_t e = lane(); e < route.experts; e += kWarp) chosen += counts[e];
  chosen = warp_reduce(chosen, [](int64_t a, int64_t b) { return a + b; }) / route.top_k;
  return chosen > 0 ? static_cast<float>(chosen) : 1;
}

// Budget: 64 registers, 0 bytes shared, no spills.
template <class T>
__global__ void __launch_bounds__(kExpertWarps* kWarp)
    route_backward(Route route, RouteBackward io, const int64_t* counts, const float* grad_balance,
                   const float* grad_z, int64_t rows) {
  const int64_t row = warp_of_launch();
  if (row >= rows) return;  // all lanes of a warp have the same row
  const int n = static_cast<int>(route.experts), k = static_cast<int>(route.top_k);
  auto* slope = shared_of_warp<float>(n);  // the gradients of the scores, then those of the logits
  const int64_t* index = io.index + row * k;
  T* grad = static_cast<T*>(io.grad_logits) + row * n;
  if (index[0] < 0) {
    for (int e = lane(); e < n; e += kWarp) grad[e] = rounded<T>(0.f);
    return;
  }
  const bool sigmoid = route.score == RouteScore::kSigmoid;
  const Token<T> token(route, static_cast<const T*>(io.logits) + row * n);
  const Weights<T> weights(route, token, index);
  const float tokens = tokens_of(route, counts);
  const float factor =
      grad_balance == nullptr ? 0 : *grad_balance * (static_cast<float>(n) / tokens) / tokens;
  float dot = 0;
  for (int e = lane(); e < n; e += kWarp) {
    slope[e] = grad_balance == nullptr ? 0 : factor * static_cast<float>(counts[e]);
    if (sigmoid) dot += slope[e] * sigmoid_of(token.logit(e)).value;
  }
  if (sigmoid && grad_balance != nullptr) {
    dot = warp_sum(dot) / token.sigmoids;
    for (int e = lane(); e < n; e += kWarp) slope[e] = (slope[e] - dot) / token.sigmoids;
  }
  // The gradients of the weights, and their sum along the weights.
  const auto given = [&](int i) {
    return to_float(static_cast<const T*>(io.grad_weight)[row * k + i]) * route.scale;
  };
  const bool of_chosen = is_softmax_of_chosen(route), has_weight = io.grad_weight != nullptr;
  float along = 0;
  for (int i = lane(); i < k && has_weight; i += kWarp) along += given(i) * weights(index[i]);
  along = route.renormalize || of_chosen ? warp_sum(along) : 0;
  __syncwarp();
  for (int i = lane(); i < k && has_weight && !of_chosen; i += kWarp)
    slope[index[i]] += (given(i) - along) / weights.divisor;
  __syncwarp();
  dot = 0;
  for (int e = lane(); e < n && !sigmoid; e += kWarp) dot += slope[e] * token.share(e);
  dot = warp_sum(dot);
  const float to_lse = grad_z == nullptr ? 0 : *grad_z * 2 / tokens * token.log_sum();
  for (int e = lane(); e < n; e += kWarp) {
    float to_logit;
    if (sigmoid) {
      const Sigmoid s = sigmoid_of(token.logit(e));
      to_logit = slope[e] * s.value * s.rest;
    } else {
      to_logit = token.share(e) * (slope[e] - dot);
    }
    slope[e] = grad_z == nullptr ? to_logit : to_logit + to_lse * token.share(e);
  }
  __syncwarp();
  for (int i = lane(); i < k && has_weight && of_chosen; i += kWarp)
    slope[index[i]] += weights(index[i]) * (given(i) - along);
  __syncwarp();
  for (int e = lane(); e < n; e += kWarp) grad[e] = rounded<T>(slope[e]);
}

template <class T>
const char* run_forward(const Route& route, const RouteForward& io, int64_t rows, const RouteParts& parts,
                        void* stream) {
  const ExpertWarps warps(parts.parts, 16 * route.experts);
  return launch(route_tokens<T>, warps.blocks, warps.threads, warps.shared_bytes, stream, route, io, rows,
                parts);
}

template <class T>
const char* run_backward(const Route& route, const RouteBackward& io, const int64_t* counts,
                         const float* grad_balance, const float* grad_z, int64_t rows, void* stream) {
  const ExpertWarps warps(rows, 4 * route.experts);
  return launch(route_backward<T>, warps.blocks, warps.threads, warps.shared_bytes, stream, route, io, counts,
                grad_balance, grad_z, rows);
}

const char* run_finish(const Route& route, const RouteParts& parts, int64_t* counts, float* balance, float* z,
                       void* stream) {
  return launch(finish_route, 1, kFinishThreads, 0, stream, route, parts, counts, balance, z);
}

const kernels::RouteCuda kTable{run_forward<float>,  run_forward<__nv_bfloat16>,  run_forward<__half>,
                                run_backward<float>, run_backward<__nv_bfloat16>, run_backward<__half>,
                                run_finish};
const bool kProvided = (provide("moe_route", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
