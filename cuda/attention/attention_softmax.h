#pragma once

#include "cuda/core/math.h"
#include "cuda/core/warp.h"

namespace shoestring::cuda {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

/// The running softmax of two rows of scores, which four lanes share. `top` is the largest score so far,
/// multiplied by log2(e). `sum` is the sum of exponentials over this lane's scores.
struct Softmax {
  float top[2], sum[2];

  __device__ explicit Softmax(float sink) {  // sink is -inf if there is no attention sink
    top[0] = top[1] = sink * kLog2e;
    sum[0] = sum[1] = lane() % 4 == 0 && sink != -INFINITY ? 1.f : 0.f;
  }

  /// Replaces each score by 2^(score * factor - top), where top is the new maximum. `shrink` receives the
  /// factor by which earlier sums must be multiplied, because the maximum has grown.
  template <int kTiles>
  __device__ void update(float (&s)[kTiles][4], float factor, float (&shrink)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float high = -INFINITY;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) high = fmaxf(high, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
      high = fmaxf(high, __shfl_xor_sync(kAllLanes, high, 1));
      high = fmaxf(high, __shfl_xor_sync(kAllLanes, high, 2));
      const float next = fmaxf(top[r], high * factor), base = next == -INFINITY ? 0.f : next;
      shrink[r] = fast_exp2(top[r] - base);
      top[r] = next;
      sum[r] *= shrink[r];
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        // The product must not be fused with the subtraction: the largest score of a row must give exactly 1,
        // however large it is.
        s[j][2 * r] = fast_exp2(__fmul_rn(s[j][2 * r], factor) - base);
        s[j][2 * r + 1] = fast_exp2(__fmul_rn(s[j][2 * r + 1], factor) - base);
        sum[r] += s[j][2 * r] + s[j][2 * r + 1];
      }
    }
  }

  /// Returns in `by` the factor that normalises the sums of a row, and in `lse` its log-sum-exp. For a row
  /// that sees no key they are 0 and -inf.
  __device__ void finish(float (&by)[2], float (&lse)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float all = sum[r];
      all += __shfl_xor_sync(kAllLanes, all, 1);
      all += __shfl_xor_sync(kAllLanes, all, 2);
      by[r] = all == 0 ? 0.f : fast_reciprocal(all);
      lse[r] = all == 0 ? -INFINITY : top[r] * kLn2 + logf(all);
    }
  }
};

/// Multiplies each of the two rows of which this lane holds elements by the row's factor in `by`.
template <int kTiles>
__device__ void scale_rows(float (&out)[kTiles][4], const float (&by)[2]) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[j][i] *= by[i / 2];
  }
}

}  // namespace shoestring::cuda
