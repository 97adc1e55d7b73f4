#pragma once

// Backward of attention on CUDA. One kernel computes the gradients of keys and values, another one the
// gradient of queries. Both kernels compute the scores again. Every element of a gradient is written by one
// thread only. So the kernels need no atomics, and every run gives the same bits.

#include "cuda/attention/attention.h"
#include "cuda/attention/attention_scores.h"
#include "cuda/core/math.h"

namespace shoestring::cuda {

/// Number of rows in the tiles that a backward kernel loads in every iteration of its loop. Shared memory
/// holds two stages of two such tiles: one stage is in use while the other one is being loaded. It also holds
/// two tiles of kRows rows for the whole loop. In all this takes at most 99 KiB.
template <class T, int kFeatures>
constexpr int kPassing = kFeatures * sizeof(T) <= 256   ? 32
                         : kFeatures * sizeof(T) <= 512 ? 16
                                                        : 8;

template <class T, int kFeatures>
constexpr int kBackwardShared = (2 * kRows<T, kFeatures> + 4 * kPassing<T, kFeatures>)*kPitch<T, kFeatures>;

/// Whether loads of each input may be vectors, and whether stores of each gradient may be pairs.
struct BackwardAccess {
  bool q, k, v, grad_out, grad_q, grad_k, grad_v;
};

template <class T>
BackwardAccess backward_access(const AttentionTensors& t, const AttentionGradients& g) {
  constexpr int size = sizeof(T);
  return {access_of(t.q, t.q_at, size).vectors, access_of(t.k, t.k_at, size).vectors,
          access_of(t.v, t.v_at, size).vectors, access_of(g.grad_out, g.grad_out_at, size).vectors,
          access_of(g.q, g.q_at, size).pairs,   access_of(g.k, g.k_at, size).pairs,
          access_of(g.v, g.v_at, size).pairs};
}

/// Statistics of one query. lse is its log-sum-exp to base 2, or if Scores::apply() has subtracted the
/// log-sum-exp, the part that rounding has lost; delta is the sum of grad_out * out over its features. For an
/// index after the last query, stats_of() returns an infinite lse, so that probabilities become 0. Its
/// argument `row` is the index of the sequence's first query in the tensor lse.
struct QueryStats {
  float lse, delta;
};
__device__ inline QueryStats stats_of(const AttentionTensors& t, const AttentionGradients& g, int64_t row,
                                      int queries, int query) {
  if (query >= queries) return {INFINITY, 0};
  const float lse = t.lse[row + query] * kLog2e;
  const float slack = fabsf(lse) > kLargeScore ? fabsf(lse) * kScoreError : 0.f;
  return {lse == -INFINITY ? 0.f : lse - slack, g.delta[row + query]};
}
__device__ inline QueryStats stats_of(const AttentionTensors& t, const AttentionGradients& g,
                                      const Scores& scores, int query) {
  if (!scores.special()) return stats_of(t, g, scores.row, scores.at.queries, query);
  if (query >= scores.at.queries) return {INFINITY, 0};
  const float rest = t.lse_rest != nullptr ? t.lse_rest[scores.row + query] : 0.f;
  return {rest * kLog2e, g.delta[scores.row + query]};
}

/// Converts the results of the products q k^T (in s) and grad_out v^T (in by) to operands for the gradients.
/// s becomes the probabilities, with 0 for dropped ones. by becomes the gradient of the scores. stats(j, i)
/// returns the statistics of the query to which s[j][i] belongs.
template <bool turned, bool kCapSlope, int kTiles, class Stats>
__device__ void differentiate(const Scores& scores, float (&s)[kTiles][4], float (&by)[kTiles][4],
                              int first_row, int first_column, Stats stats) {
  uint32_t kept = ~0u;
  if (scores.drops()) {
    kept = scores.kept<turned, kTiles>(first_row, first_column);
#pragma unroll
    for (int e = 0; e < kTiles * 4; ++e) by[e / 4][e % 4] *= kept >> e & 1 ? scores.p.kept : 0.f;
  }
#pragma unroll
  for (int e = 0; e < kTiles * 4; ++e) by[e / 4][e % 4] -= stats(e / 4, e % 4).delta;
  scores.apply<turned>(s, kCapSlope ? by : nullptr, first_row, first_column);
#pragma unroll
  for (int e = 0; e < kTiles * 4; ++e) {
    const float x = s[e / 4][e % 4] * scores.factor - stats(e / 4, e % 4).lse;
    // A probability is exp2(x) with x <= 0. With scores near 10^9, rounding may make x so large that exp2
    // would overflow, so positive x are replaced by 0.
    const float probability = fast_exp2(x > 0 ? 0.f : x);
    by[e / 4][e % 4] *= probability;
    s[e / 4][e % 4] = kept >> e & 1 ? probability : 0.f;
  }
}

}  // namespace shoestring::cuda
