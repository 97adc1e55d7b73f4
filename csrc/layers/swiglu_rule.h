#pragma once

#include "layers/gated_rule.h"

namespace shoestring::kernels {

// silu(x) is x times the logistic function.
struct Silu {
  template <class V, class Math>
  static SHOESTRING_HOST_DEVICE Activation<V> at(V x, Math math) {
    const Logistic<V> s(x, math);
    return {x * s.of, s.of + x * s.of * s.of_negative};
  }
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::ElementwiseTable, swiglu)
