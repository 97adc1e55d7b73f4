#pragma once

// The formulas of the gates of experts that no other operator has.

#include "layers/gated_rule.h"

namespace shoestring::kernels {

// x times the logistic function of 1.702 x
struct SiluOai {
  static constexpr float kAlpha = 1.702f;
  template <class V, class Math>
  static SHOESTRING_HOST_DEVICE Activation<V> at(V x, Math math) {
    const Logistic<V> s(kAlpha * x, math);
    return {x * s.of, s.of + kAlpha * x * s.of * s.of_negative};
  }
};

// The offset that is added to the second factor.
template <class A>
constexpr float kOffset = 0;
template <>
constexpr float kOffset<SiluOai> = 1;

}  // namespace shoestring::kernels
