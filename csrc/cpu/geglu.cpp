// gelu(gate) * up: cpu/gated.h, with x times the normal distribution's function, or what is close to it. Both are made
// without cancellation, so that far below zero the result is small and not nothing.

#include "kernels/geglu.h"

#include "cpu/gated.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

// (1 + tanh(u)) / 2 is the logistic function of 2 u.
struct GeluTanh {
  static constexpr float kTwice = 1.5957691216f, kCube = 0.044715f;  // 2 sqrt(2 / pi)
  F32 x;
  Logistic s;
  explicit SHOESTRING_METHOD GeluTanh(F32 x) : x(x), s(kTwice * (x + kCube * x * x * x)) {}
  SHOESTRING_METHOD F32 of() const { return x * s.of; }
  SHOESTRING_METHOD F32 slope() const {
    // Where x is so large that its square is infinite, the rest is zero.
    const F32 rest = s.of * s.of_negative;
    return s.of + (rest > 0.f ? x * rest * (kTwice * (1.f + 3 * kCube * x * x)) : F32{});
  }
};

// The share of the normal distribution beyond |x| is exp(-x^2 / 2) t P(t), t = 1 / (1 + 0.35 |x|), P of degree 8 with a
// relative error of 4e-8, fitted at Chebyshev's points for |x| up to 14, where it is zero in fp32.
struct GeluErf {
  F32 x, density, below;  // of the distribution, at x
  explicit SHOESTRING_METHOD GeluErf(F32 x) : x(x) {
    const F32 bell = exp(-0.5f * x * x), t = 1.f / (1.f + 0.35f * abs(x));
    constexpr float kP[] = {-0.0295525694f, 0.145892507f, -0.25954765f, 0.163379195f, -0.0258708352f, 0.106614f, 0.119570151f, 0.139895557f, 0.139619625f};
    F32 p = splat(kP[0]);
#pragma GCC unroll 8
    for (int i = 1; i <= 8; ++i) p = fma(p, t, splat(kP[i]));
    const F32 beyond = bell * t * p;
    below = x > 0.f ? 1.f - beyond : beyond;
    density = bell * 0.3989422804f;
  }
  SHOESTRING_METHOD F32 of() const { return x * below; }
  SHOESTRING_METHOD F32 slope() const { return below + (density > 0.f ? x * density : F32{}); }
};

}  // namespace

extern const kernels::GatedTable geglu_tanh, geglu_erf;
const kernels::GatedTable geglu_tanh = gated_table<GeluTanh>(), geglu_erf = gated_table<GeluErf>();

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
