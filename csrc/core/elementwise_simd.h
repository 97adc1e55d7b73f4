#pragma once

// The CPU kernels of elementwise operators (core/elementwise_table.h). Each pass reads its inputs once. It
// computes two registers of each array at a time. Fewer elements at the end are copied to buffers, and
// computed there.

#include "core/element_simd.h"
#include "core/elementwise_table.h"
#include "core/exp_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

constexpr int64_t kElementwiseStep = 2 * kLanes;
// Number of bytes by which prefetches run ahead of a loop. The prefetcher of some CPUs is too late for loops
// over three arrays, above all if results are written over inputs: half of the time was spent waiting.
constexpr int64_t kElementwiseAhead = 2048;

// The functions of a rule. For 16-bit dtypes (kIsShort), a relative error of 2^-15 is good enough.
template <bool kIsShort>
struct ElementwiseMath {
  static constexpr bool kShort = kIsShort;
  static SHOESTRING_METHOD F32 abs(F32 x) { return cpu::SHOESTRING_CAPABILITY::abs(x); }
  // Returns the number in [low, high] that is nearest to x, and NaN for NaN.
  static SHOESTRING_METHOD F32 clamp(F32 x, float low, float high) {
    return min(splat(high), max(splat(low), x));
  }
  static SHOESTRING_METHOD F32 exp(F32 x) { return cpu::SHOESTRING_CAPABILITY::exp(x); }
  // Returns e^x for x <= 0.
  static SHOESTRING_METHOD F32 exp_of_negative(F32 x) {
    return kShort ? short_exp_of_negative(x) : cpu::SHOESTRING_CAPABILITY::exp_of_negative(x);
  }
  // Returns 1 / x for x from 1 to 2^120.
  static SHOESTRING_METHOD F32 reciprocal(F32 x) { return cpu::SHOESTRING_CAPABILITY::reciprocal(x); }
};

template <class Rule, class E, bool kBackward>
struct ElementwiseLoop {
  using T = typename E::Type;
  static constexpr int kIn = Rule::kInputs + kBackward, kOut = kBackward ? Rule::kOutputs : 1;
  static constexpr int kAlways = kBackward ? Rule::kInputs : 1;  // number of results that are never null

  const Rule& rule;
  const T* in[kIn];
  T* out[kOut];

  SHOESTRING_METHOD void compute(const F32 (&x)[kIn], F32 (&y)[kOut]) const {
    const ElementwiseMath<sizeof(T) == 2> math;
    if constexpr (kBackward) {
      rule.backward(x, y, math);
    } else {
      rule.forward(x, y, math);
    }
  }

  SHOESTRING_METHOD void step(int64_t i) const {
    F32 x[2][kIn], y[2][kOut];
#pragma GCC unroll 8
    for (int k = 0; k < kIn; ++k) {
      const Pair both = E::load_pair(in[k] + i);
      x[0][k] = both.first;
      x[1][k] = both.second;
    }
    compute(x[0], y[0]);
    compute(x[1], y[1]);
#pragma GCC unroll 8
    for (int k = 0; k < kOut; ++k) {
      if (k < kAlways || out[k] != nullptr) E::store_pair(out[k] + i, {y[0][k], y[1][k]});
    }
  }

  SHOESTRING_METHOD void run(int64_t count) const {
    int64_t i = 0;
    for (; i + kElementwiseStep <= count; i += kElementwiseStep) {
#pragma GCC unroll 8
      for (int k = 0; k < kIn; ++k)
        ask_for(in[k] + i, kElementwiseAhead / static_cast<int64_t>(sizeof(T)), kElementwiseStep);
      step(i);
    }
    if (i == count) return;
    T x[kIn][kElementwiseStep] = {}, y[kOut][kElementwiseStep];
    ElementwiseLoop rest{rule, {}, {}};
#pragma GCC unroll 8
    for (int k = 0; k < kIn; ++k) {
      __builtin_memcpy(x[k], in[k] + i, (count - i) * sizeof(T));
      rest.in[k] = x[k];
    }
#pragma GCC unroll 8
    for (int k = 0; k < kOut; ++k) rest.out[k] = y[k];
    rest.step(0);
#pragma GCC unroll 8
    for (int k = 0; k < kOut; ++k) {
      if (out[k] != nullptr) __builtin_memcpy(out[k] + i, y[k], (count - i) * sizeof(T));
    }
  }
};

template <class Rule, class E, bool kBackward>
void run_elementwise(const void* rule, const void* const* in, int64_t count, void* const* out) {
  using Loop = ElementwiseLoop<Rule, E, kBackward>;
  const Rule with_options = kernels::rule_at<Rule>(rule);
  Loop loop{with_options, {}, {}};
#pragma GCC unroll 8
  for (int k = 0; k < Loop::kIn; ++k) loop.in[k] = static_cast<const typename E::Type*>(in[k]);
#pragma GCC unroll 8
  for (int k = 0; k < Loop::kOut; ++k) loop.out[k] = static_cast<typename E::Type*>(out[k]);
  loop.run(count);
}

template <class Rule>
constexpr kernels::ElementwiseTable elementwise_table() {
  return {{run_elementwise<Rule, Float, false>, run_elementwise<Rule, BFloat16, false>,
           run_elementwise<Rule, Half, false>},
          {run_elementwise<Rule, Float, true>, run_elementwise<Rule, BFloat16, true>,
           run_elementwise<Rule, Half, true>}};
}

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
