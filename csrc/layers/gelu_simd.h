#pragma once

// GELU in registers of the CPU. gelu(x) is x times the distribution function of the standard normal
// distribution, or times a tanh approximation of it. Both are computed without cancellation, so a small
// result for a large negative x is accurate and not 0.

#include "core/elementwise_simd.h"
#include "layers/gated_rule.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

// GELU with the tanh approximation: x times (1 + tanh(u)) / 2, which is the logistic function of 2 u.
struct GeluTanh {
  // 2 u = kTwice * (x + kCube * x^3), where kTwice is 2 sqrt(2 / pi)
  static constexpr float kTwice = 1.5957691216f, kCube = 0.044715f;
  template <class Math>
  static SHOESTRING_METHOD kernels::Activation<F32> at(F32 x, Math math) {
    const kernels::Logistic<F32> s(x * fma(x * x, splat(kTwice * kCube), splat(kTwice)), math);
    // `rest` is the product of the logistic functions of 2 u and -2 u. If x * x overflows to infinity, `rest`
    // is 0 and their product would be NaN, so 0 is used instead.
    const F32 rest = s.of * s.of_negative;
    return {x * s.of,
            s.of + (rest > 0.f ? x * rest * fma(x * x, splat(3 * kTwice * kCube), splat(kTwice)) : F32{})};
  }
};

// Exact GELU. The tail of the normal distribution beyond |x| is exp(-x^2 / 2) t P(t) with t = 1 / (1 + 0.35
// |x|). The polynomial P has degree 8 and a relative error of 4e-8; for 16-bit dtypes, it has degree 5 and a
// relative error of 2.4e-5. P was fitted for |x| up to 14, where the tail is 0 in fp32.
struct GeluErf {
  template <class Math>
  static SHOESTRING_METHOD kernels::Activation<F32> at(F32 x, Math math) {
    constexpr bool kShort = Math::kShort;
    const F32 bell = math.exp_of_negative(-0.5f * x * x);
    const F32 t = reciprocal(fma(min(splat(20.f), abs(x)), splat(0.35f), splat(1.f)));
    constexpr float kP[] = {-0.0295525694f, 0.145892507f, -0.25954765f, 0.163379195f, -0.0258708352f,
                            0.106614f,      0.119570151f, 0.139895557f, 0.139619625f};
    constexpr float kShortP[] = {-0.0328576453f, 0.00805514213f, 0.145002648f,
                                 0.0954560265f,  0.145098224f,   0.139233425f};
    F32 p = splat(kShort ? kShortP[0] : kP[0]);
#pragma GCC unroll 8
    for (int i = 1; i < (kShort ? 6 : 9); ++i) p = fma(p, t, splat(kShort ? kShortP[i] : kP[i]));
    const F32 beyond = bell * t * p;
    // the standard normal distribution function and density at x
    const F32 below = x > 0.f ? 1.f - beyond : beyond, density = bell * 0.3989422804f;
    return {x * below, below + (density > 0.f ? x * density : F32{})};
  }
};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
