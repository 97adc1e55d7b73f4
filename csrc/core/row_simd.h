#pragma once

// Loops and functions for a row of logits, which is processed one register at a time. For fp64, a register is
// a plain double, which holds one element.

#include <math.h>

#include "core/exp_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

constexpr float kLow = -__builtin_inff();

// Each lane sums 256 elements in fp32 before its sum is added to a double, so the rounding error is as small
// as in a sum of 256 elements.
constexpr int64_t kFold = 256 * kLanes;

// Calls body(offset, count) for each group of kStep elements in [begin, end), and once more for the remaining
// elements.
template <int64_t kStep = kLanes, class Body>
SHOESTRING_INLINE void sweep(int64_t begin, int64_t end, Body body) {
  int64_t i = begin;
  for (; i + kStep <= end; i += kStep) body(i, int64_t{kStep});
  if (i < end) body(i, end - i);
}

// Calls body(offset, count) for each group of kStep elements in [0, vocab) and for the remaining elements.
// Calls fold() after every kFold elements and at the end.
template <int64_t kStep = kLanes, class Body, class Fold>
SHOESTRING_INLINE void folded(int64_t vocab, Body body, Fold fold) {
  for (int64_t begin = 0; begin < vocab; begin += kFold) {
    sweep<kStep>(begin, begin + kFold < vocab ? begin + kFold : vocab, body);
    fold();
  }
}

SHOESTRING_INLINE F32 get(const float* p, int64_t n, float fill) {
  return n == kLanes ? load(p) : load(p, n, fill);
}
SHOESTRING_INLINE void put(float* p, F32 v, int64_t n) {
  if (n == kLanes) {
    store(p, v);
  } else {
    store(p, v, n);
  }
}

SHOESTRING_INLINE F32 tanh(F32 x) {
  F32 square = x * x;
  F32 p = splat(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  F32 near_zero = x + x * square * p;
  F32 elsewhere = 1.f - 2.f / (exp(2.f * x) + 1.f);
  return abs(x) < 0.625f ? near_zero : elsewhere;
}

// Returns 1 - e^-x for x >= 0, accurate also for small x. The result for NaN is NaN.
SHOESTRING_INLINE F32 one_less_exp(F32 x) {
  F32 p = splat(-1.f / 40320);
  p = p * x + 1.f / 5040;
  p = p * x - 1.f / 720;
  p = p * x + 1.f / 120;
  p = p * x - 1.f / 24;
  p = p * x + 1.f / 6;
  p = p * x - 0.5f;
  return x < 0.34f ? x + x * x * p : 1.f - exp(-x);
}

// Returns ln(1 - w) for w in [0, 1), if 1 - w is a normal number. Writes 1 - w as 2^n m with m in [0.7, 1.4),
// and uses ln m = 2 artanh((m - 1) / (m + 1)). If n is 0, m - 1 is exactly -w. The result for NaN is NaN.
SHOESTRING_INLINE F32 log_of_rest(F32 w) {
  U32 above = as_bits(1.f - w) - 0x3f333333u;  // 0x3f333333 is the bit pattern of 0.7
  F32 n = __builtin_convertvector((I32)above >> 23, F32);
  F32 m = as_float((above & 0x7fffffu) + 0x3f333333u);
  F32 beyond = n == 0 ? -w : m - 1.f, s = beyond / (beyond + 2.f), square = s * s;
  F32 p = splat(2.f / 9);
  p = p * square + 2.f / 7;
  p = p * square + 2.f / 5;
  p = p * square + 2.f / 3;
  F32 y = n * 0.693145752f + (n * 1.42860677e-6f + (s * square * p + 2.f * s));
  return w == w ? y : w;
}

// The register type that row functions use for element type T: F32 for float, and a plain double for double.
template <class T>
struct Register;
template <>
struct Register<float> {
  using Type = F32;
  static constexpr int64_t kSize = kLanes;
};
template <>
struct Register<double> {
  using Type = double;
  static constexpr int64_t kSize = 1;
};

template <class T>
using RegisterOf = typename Register<T>::Type;
template <class T>
constexpr int64_t kSizeOf = Register<T>::kSize;

SHOESTRING_INLINE double get(const double* p, int64_t, double) { return *p; }
SHOESTRING_INLINE void put(double* p, double v, int64_t) { *p = v; }
SHOESTRING_INLINE double exp(double x) { return ::exp(x); }
SHOESTRING_INLINE double one_less_exp(double x) { return -::expm1(-x); }
SHOESTRING_INLINE double log_of_rest(double w) { return ::log1p(-w); }
SHOESTRING_INLINE double abs(double x) { return ::fabs(x); }
SHOESTRING_INLINE double max(double a, double b) { return a > b ? a : b; }
SHOESTRING_INLINE double horizontal_sum(double x) { return x; }
SHOESTRING_INLINE double horizontal_max(double x) { return x; }

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
