#pragma once

#include "cuda/core/math.h"
#include "cuda/core/warp.h"

namespace shoestring::cuda {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

/// The running softmax of two rows of scores, which four lanes share. `top` is the largest score so far,
/// multiplied by log2(e) unless `natural`. `sum` is the sum of exponentials over this lane's scores.
///
/// `natural` is for scores that a bias may make large. Multiplied by log2(e), they would have another
/// rounding error or become infinite. So the maximum is subtracted first, which is exact for scores near the
/// maximum.
struct Softmax {
  float top[2], sum[2];

  __device__ explicit Softmax(float sink, bool natural = false) {  // sink is -inf without an attention sink
    top[0] = top[1] = natural ? sink : sink * kLog2e;
    sum[0] = sum[1] = lane() % 4 == 0 && sink != -INFINITY ? 1.f : 0.f;
  }

  /// Replaces each score by 2^(score * factor - top), where top is the new maximum. `shrink` receives the
  /// factor by which earlier sums must be multiplied, because the maximum has grown. If `natural`, factor is
  /// log2(e), and a score becomes 2^((score - top) * factor).
  template <int kTiles>
  __device__ void update(float (&s)[kTiles][4], float factor, float (&shrink)[2], bool natural = false) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float high = -INFINITY;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) high = fmaxf(high, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
      high = fmaxf(high, __shfl_xor_sync(kAllLanes, high, 1));
      high = fmaxf(high, __shfl_xor_sync(kAllLanes, high, 2));
      const float next = fmaxf(top[r], natural ? high : high * factor);
      float base = next == -INFINITY ? 0.f : next;
      shrink[r] = fast_exp2((top[r] - base) * (natural ? kLog2e : 1.f));
      top[r] = next;
      sum[r] *= shrink[r];
      if (natural) {
#pragma unroll
        for (int j = 0; j < kTiles; ++j) s[j][2 * r] -= base, s[j][2 * r + 1] -= base;
        base = 0;
      }
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
  /// that sees no key they are 0 and -inf. Returns in `rest`, unless it is null, the part of the log-sum-exp
  /// that rounding has lost (Knuth's TwoSum), which is 0 if the sum is not finite. Only `natural` has a rest.
  __device__ void finish(float (&by)[2], float (&lse)[2], bool natural = false, float* rest = nullptr) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float all = sum[r];
      all += __shfl_xor_sync(kAllLanes, all, 1);
      all += __shfl_xor_sync(kAllLanes, all, 2);
      by[r] = all == 0 ? 0.f : fast_reciprocal(all);
      const float log = logf(all);
      lse[r] = all == 0 ? -INFINITY : natural ? __fadd_rn(top[r], log) : top[r] * kLn2 + log;
      if (rest != nullptr) {
        const float of_log = __fsub_rn(lse[r], top[r]);
        const float lost = __fsub_rn(top[r], __fsub_rn(lse[r], of_log)) + __fsub_rn(log, of_log);
        rest[r] = lost - lost == 0 ? lost : 0.f;
      }
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
