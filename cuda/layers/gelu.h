#pragma once

// The activation gelu on CUDA. gelu(x) is x times the distribution function of the normal distribution, or
// times the tanh approximation of that function. Both formulas avoid cancellation, so for very negative x the
// result is small but not 0.

#include "layers/gated_rule.h"

namespace shoestring::cuda {
namespace {

using kernels::Activation;

// The tanh approximation of GELU is x (1 + tanh(u)) / 2. The code uses that (1 + tanh(u)) / 2 is the logistic
// function of 2 u.
struct GeluTanh {
  static constexpr float kTwice = 1.5957691216f, kCube = 0.044715f;  // kTwice is 2 sqrt(2 / pi)
  template <class Math>
  static __device__ Activation<float> at(float x, Math math) {
    const kernels::Logistic<float> s(kTwice * (x + kCube * x * x * x), math);
    // If x is so large that x * x is infinite, `rest`, the derivative of the logistic function, is 0. The
    // product of the two would be NaN, so it is left out.
    const float rest = s.of * s.of_negative;
    return {x * s.of, s.of + (rest > 0 ? x * rest * (kTwice * (1 + 3 * kCube * x * x)) : 0)};
  }
};

struct GeluErf {
  template <class Math>
  static __device__ Activation<float> at(float x, Math) {
    // the distribution function and the density of the normal distribution at x
    const float below = 0.5f * erfcf(-0.7071067812f * x), density = 0.3989422804f * expf(-0.5f * x * x);
    return {x * below, below + (density > 0 ? x * density : 0)};
  }
};

}  // namespace
}  // namespace shoestring::cuda
