#pragma once

// Exponential functions and reciprocals of fp32 registers.

#include "core/vec_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

// The integer n nearest to a number x with |x| < 2^21. `power` encodes n for scale_by_power() or, from
// shifted_whole(), for times_power().
struct Whole {
  F32 n, power;
};
SHOESTRING_INLINE Whole shifted_whole(F32 x) {
  // 12583039 is 1.5 * 2^23 + 127. Adding it to x rounds x to the integer n and leaves n + 127, the biased
  // exponent of 2^n, in the low bits.
  const F32 shifted = x + 12583039.f;
  return {shifted - 12583039.f, shifted};
}
// Returns y * 2^n for n from -127 to 127, where n = -127 gives 0.
SHOESTRING_INLINE F32 times_power(F32 y, F32 power) { return y * as_float(as_bits(power) << 23); }

// Like shifted_whole(), but with the power for scale_by_power().
SHOESTRING_INLINE Whole nearest_whole(F32 x) {
#if defined(__AVX512F__)
  const F32 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return {n, n};
#else
  return shifted_whole(x);
#endif
}
// Returns y * 2^n. Without AVX-512, n must be from -127 to 127, and n = -127 gives 0.
SHOESTRING_INLINE F32 scale_by_power(F32 y, F32 power) {
#if defined(__AVX512F__)
  return _mm512_scalef_ps(y, power);
#else
  return times_power(y, power);
#endif
}

// Computes e^x as y * 2^n for x from -105 to 89: returns y, given the integer n nearest to x / ln 2. Here x =
// (n + r) ln 2 with |r| <= 1/2, and y is a polynomial in r that approximates 2^r. For a NaN, y is NaN.
SHOESTRING_INLINE F32 reduced_exp(F32 x, const Whole& whole) {
#if defined(__FMA__)
  const F32 r = fma(x, splat(1.92596299e-8f), fma(x, splat(1.44269502f), -whole.n)), square = r * r;
#else  // without FMA, ln 2 is split into two constants, so that the product of n and the larger one is exact
  const F32 rest = x - whole.n * 0.693145752f - whole.n * 1.42860677e-6f, r = rest * 1.44269502f,
            square = r * r;
#endif
  const F32 high = fma(splat(1.54614477e-4f), r, splat(1.33908668e-3f));
  const F32 middle = fma(splat(9.61805694e-3f), r, splat(5.55035695e-2f));
  const F32 low = fma(splat(0.240226507f), r, splat(0.693147182f));
  return fma(fma(fma(high, square, middle), square, low), r, splat(1.f));
}

#if defined(__AVX512F__)
constexpr float kLeastExp = -105.f;  // at or below this x, e^x rounds to 0
#else
constexpr float kLeastExp = -87.33f;  // e^-87.33 is about the smallest normal number
#endif

// Returns y, the computed value of e^x, or 0 if x is too small for scale_by_power().
SHOESTRING_INLINE F32 unless_too_small(F32 x, F32 y) {
#if defined(__AVX512F__)
  return y;
#else
  return x < kLeastExp ? F32{} : y;
#endif
}

// The functions of x <= 0 return 0 for x below this, as the exponent of e^-88 is -127. Intel's CPUs take
// about 150 cycles for an instruction whose result is a subnormal number or underflows to 0, and half of the
// scores of a causal mask's diagonal are -inf.
constexpr float kNegligible = -88.f;

// Returns e^x for x <= 0 with an error of about 1 ulp. Results below 2^-126.5 are 0. e^NaN is NaN.
SHOESTRING_INLINE F32 exp_of_negative(F32 x) {
  const F32 t = max(splat(kNegligible), x);
  const Whole whole = shifted_whole(t * 1.44269502f);
  return times_power(reduced_exp(t, whole), whole.power);
}

// Returns e^x for x <= 0 with a relative error of 2^-17, for results that are then rounded to 16 bits.
SHOESTRING_INLINE F32 short_exp_of_negative(F32 x) {
  const F32 t = max(splat(kNegligible), x) * 1.44269502f;
  const Whole whole = shifted_whole(t);
  const F32 r = t - whole.n;
  const F32 high = fma(fma(splat(9.58285294e-3f), r, splat(5.59064262e-2f)), r, splat(0.240240991f));
  return times_power(fma(fma(high, r, splat(0.693124175f)), r, splat(1.f)), whole.power);
}

// Returns e^x for every x with an error of about 1 ulp, and infinity if e^x exceeds the largest fp32 number.
// Without AVX-512, results below 2^-125.5 are 0.
SHOESTRING_INLINE F32 exp(F32 x) {
  const F32 t = min(splat(89.f), max(splat(kLeastExp), x));
  const Whole whole = nearest_whole(t * 1.44269502f);
  const F32 y = reduced_exp(t, whole);
#if defined(__AVX512F__)
  return scale_by_power(y, whole.power);
#else
  return unless_too_small(
      // y * 2^n is computed as (2 y) * 2^(n - 1), because n may be 128, and 2^128 is not an fp32 number.
      x, scale_by_power(y * 2.f, whole.power - 1.f));
#endif
}

// Returns 1 / x for x from 1 to 2^120 with an error of about 1 ulp.
SHOESTRING_INLINE F32 reciprocal(F32 x) {
#if defined(__AVX512F__)
  const F32 y = _mm512_rcp14_ps(x);
  return fma(y, _mm512_fnmadd_ps(x, y, splat(1.f)), y);
#else
  return 1.f / x;
#endif
}

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
