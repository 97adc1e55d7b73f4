#pragma once

// Exponentials and reciprocals of fp32 registers.

#include "core/vec_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

// n is the integer nearest to x, |x| < 2^21. `power` encodes n in the form that scale_by_power() takes.
struct Whole {
  F32 n, power;
};
SHOESTRING_INLINE Whole nearest_whole(F32 x) {
#if defined(__AVX512F__)
  const F32 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return {n, n};
#else
  const F32 shifted = x + 12583039.f;  // 1.5 * 2^23 + 127, which leaves n's biased exponent in the low bits
  return {shifted - 12583039.f, shifted};
#endif
}
// Returns 2^n y. Without AVX-512, n is from -126 to 127; n = -127 gives 0.
SHOESTRING_INLINE F32 scale_by_power(F32 y, F32 power) {
#if defined(__AVX512F__)
  return _mm512_scalef_ps(y, power);
#else
  return y * as_float(as_bits(power) << 23);
#endif
}

// Computes e^x as y 2^n for x from -105 to 89, or NaN. Here x = (n + r) ln 2 with |r| <= 1/2, and y is a
// polynomial in r that approximates 2^r.
SHOESTRING_INLINE F32 reduced_exp(F32 x, F32* power) {
  const Whole whole = nearest_whole(x * 1.44269502f);
#if defined(__FMA__)
  const F32 r = fma(x, splat(1.92596299e-8f), fma(x, splat(1.44269502f), -whole.n)), square = r * r;
#else  // without FMA: the constants are split so that the products with n need no rounding
  const F32 rest = x - whole.n * 0.693145752f - whole.n * 1.42860677e-6f, r = rest * 1.44269502f,
            square = r * r;
#endif
  const F32 high = fma(splat(1.54614477e-4f), r, splat(1.33908668e-3f));
  const F32 middle = fma(splat(9.61805694e-3f), r, splat(5.55035695e-2f));
  const F32 low = fma(splat(0.240226507f), r, splat(0.693147182f));
  *power = whole.power;
  return fma(fma(fma(high, square, middle), square, low), r, splat(1.f));
}

#if defined(__AVX512F__)
constexpr float kNoExp = -105.f, kLeastExp = kNoExp;  // e^kNoExp rounds to 0
#else
constexpr float kNoExp = -88.f;       // scale_by_power() turns e^kNoExp into 0, because its exponent is -127
constexpr float kLeastExp = -87.33f;  // e^kLeastExp is the smallest normal number
#endif

// Returns y, the value computed for exp(x), or 0 if x is too small for scale_by_power().
SHOESTRING_INLINE F32 unless_too_small(F32 x, F32 y) {
#if defined(__AVX512F__)
  return y;
#else
  return x < kLeastExp ? F32{} : y;
#endif
}

// Returns e^x for x <= 0 with an error of about 1 ulp. Results below 2^-126.5 become 0; with AVX-512 they are
// subnormal numbers. NaN stays NaN.
SHOESTRING_INLINE F32 exp_of_negative(F32 x) {
  F32 power;
  const F32 y = reduced_exp(max(splat(kNoExp), x), &power);
  return scale_by_power(y, power);
}

// Returns e^x for x <= 0 with a relative error of 2^-17, for results that are then rounded to 16 bits.
SHOESTRING_INLINE F32 short_exp_of_negative(F32 x) {
  const F32 t = max(splat(kNoExp), x) * 1.44269502f;
  const Whole whole = nearest_whole(t);
  const F32 r = t - whole.n;
  const F32 high = fma(fma(splat(9.58285294e-3f), r, splat(5.59064262e-2f)), r, splat(0.240240991f));
  return scale_by_power(fma(fma(high, r, splat(0.693124175f)), r, splat(1.f)), whole.power);
}

// Returns e^x for every x with an error of about 1 ulp. The result is infinity above the largest number.
SHOESTRING_INLINE F32 exp(F32 x) {
  F32 power;
  const F32 y = reduced_exp(min(splat(89.f), max(splat(kLeastExp), x)), &power);
#if defined(__AVX512F__)
  return scale_by_power(y, power);
#else
  return unless_too_small(
      x, scale_by_power(y * 2.f, power - 1.f));  // in two factors, because 2^128 is not an fp32 number
#endif
}

// Returns 1 / x for x from 1 to 2^120, with an error of about 1 ulp.
SHOESTRING_INLINE F32 reciprocal(F32 x) {
#if defined(__AVX512F__)
  const F32 y = _mm512_rcp14_ps(x);
  return fma(y, _mm512_fnmadd_ps(x, y, splat(1.f)), y);
#else
  return 1.f / x;
#endif
}

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
