#pragma once

// Exponentials and reciprocals of registers, for everything that is made of them.

#include "core/vec_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

// The whole number nearest to x, |x| < 2^21, and what scale_by_power() makes 2^it from.
struct Whole {
  F32 n, power;
};
SHOESTRING_INLINE Whole nearest_whole(F32 x) {
#if defined(__AVX512F__)
  const F32 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return {n, n};
#else
  const F32 shifted = x + 12583039.f;  // 1.5 * 2^23 + 127: an exponent lands in the low bits
  return {shifted - 12583039.f, shifted};
#endif
}
// 2^n y; without AVX-512 n from -126 to 127, and 0 for n = -127.
SHOESTRING_INLINE F32 scale_by_power(F32 y, F32 power) {
#if defined(__AVX512F__)
  return _mm512_scalef_ps(y, power);
#else
  return y * as_float(as_bits(power) << 23);
#endif
}

// e^x as y 2^n: x = (n + r) ln2, and a polynomial in r, |r| <= 1/2, of 2^r. x from -105 to 89, or NaN.
SHOESTRING_INLINE F32 reduced_exp(F32 x, F32* power) {
  const Whole whole = nearest_whole(x * 1.44269502f);
#if defined(__FMA__)
  const F32 r = fma(x, splat(1.92596299e-8f), fma(x, splat(1.44269502f), -whole.n)), square = r * r;
#else  // products that need no rounding
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
constexpr float kNoExp = -105.f, kLeastExp = kNoExp;  // e^it is nothing
#else
constexpr float kNoExp = -88.f;       // e^it is made to be nothing: 2^-127 is
constexpr float kLeastExp = -87.33f;  // e^it is the smallest normal number
#endif

// y, what became of exp(x), but 0 for a smaller x than powers of 2 are made for.
SHOESTRING_INLINE F32 unless_too_small(F32 x, F32 y) {
#if defined(__AVX512F__)
  return y;
#else
  return x < kLeastExp ? F32{} : y;
#endif
}

// e^x for x <= 0, within 1 ulp or so; what is below 2^-126.5 is 0 or, with AVX-512, as it is. NaN stays NaN.
SHOESTRING_INLINE F32 exp_of_negative(F32 x) {
  F32 power;
  const F32 y = reduced_exp(max(splat(kNoExp), x), &power);
  return scale_by_power(y, power);
}

// The same with a relative error of 2^-17, for results that are then rounded to 16 bits.
SHOESTRING_INLINE F32 short_exp_of_negative(F32 x) {
  const F32 t = max(splat(kNoExp), x) * 1.44269502f;
  const Whole whole = nearest_whole(t);
  const F32 r = t - whole.n;
  const F32 high = fma(fma(splat(9.58285294e-3f), r, splat(5.59064262e-2f)), r, splat(0.240240991f));
  return scale_by_power(fma(fma(high, r, splat(0.693124175f)), r, splat(1.f)), whole.power);
}

// e^x for every x, as exact; above the largest number infinity.
SHOESTRING_INLINE F32 exp(F32 x) {
  F32 power;
  const F32 y = reduced_exp(min(splat(89.f), max(splat(kLeastExp), x)), &power);
#if defined(__AVX512F__)
  return scale_by_power(y, power);
#else
  return unless_too_small(x, scale_by_power(y * 2.f, power - 1.f));  // 2^128 is no number
#endif
}

// 1 / x within 1 ulp or so, x from 1 to 2^120.
SHOESTRING_INLINE F32 reciprocal(F32 x) {
#if defined(__AVX512F__)
  const F32 y = _mm512_rcp14_ps(x);
  return fma(y, _mm512_fnmadd_ps(x, y, splat(1.f)), y);
#else
  return 1.f / x;
#endif
}

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
