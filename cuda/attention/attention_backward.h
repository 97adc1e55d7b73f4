#pragma once

// Backward of attention on CUDA. The scores are computed again twice: for the gradients of keys and values,
// and for the gradient of queries. Each of these two kernels owns the elements that it writes. No atomics are
// needed, and every run gives the same bits.

#include "cuda/attention/attention.h"
#include "cuda/attention/attention_scores.h"
#include "cuda/core/math.h"

namespace shoestring::cuda {

/// Rows of each of the two tiles that change in the loop. Two further tiles, of kRows rows, stay. Shared
/// memory holds two stages of the changing tiles (one in use, one arriving) and the two others, at most 99
/// KiB.
template <class T, int kFeatures>
constexpr int kPassing = kFeatures * sizeof(T) <= 256   ? 32
                         : kFeatures * sizeof(T) <= 512 ? 16
                                                        : 8;

template <class T, int kFeatures>
constexpr int kBackwardShared = (2 * kRows<T, kFeatures> + 4 * kPassing<T, kFeatures>)*kPitch<T, kFeatures>;

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

/// The log-sum-exp of a query in powers of 2, and its delta. After the last query, lse is infinite, so that
/// probabilities are 0. row: row of lse of the first query.
struct QueryStats {
  float lse, delta;
};
__device__ inline QueryStats stats_of(const AttentionTensors& t, const AttentionGradients& g, int64_t row,
                                      int queries, int query) {
  if (query >= queries) return {INFINITY, 0};
  const float lse = t.lse[row + query];
  return {lse == -INFINITY ? 0.f : lse * kLog2e, g.delta[row + query]};
}
__device__ inline QueryStats stats_of(const AttentionTensors& t, const AttentionGradients& g,
                                      const Scores& scores, int query) {
  return stats_of(t, g, scores.row, scores.at.queries, query);
}

/// Converts the results of two products to operands for the gradients. s becomes the probabilities, with 0
/// for dropped ones. by = grad_out v^T becomes the gradient of the scores. stats(j, i) returns the statistics
/// of the query of element i of tile j.
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
    // Scores of 10^9 round by more than exp2 can take, so x is limited to at most 0.
    const float probability = fast_exp2(x > 0 ? 0.f : x);
    by[e / 4][e % 4] *= probability;
    s[e / 4][e % 4] = kept >> e & 1 ? probability : 0.f;
  }
}

}  // namespace shoestring::cuda
