#pragma once

// The formulas of swiglu, geglu and gelu. An activation is a struct with a function at(x, math), which
// returns its value and its derivative.

#include "core/elementwise_table.h"

namespace shoestring::kernels {

template <class V>
struct Activation {
  V value, slope;
};

// Computes the logistic function of x (`of`) and of -x (`of_negative`), without cancellation in either.
template <class V>
struct Logistic {
  V of, of_negative;
  template <class Math>
  SHOESTRING_HOST_DEVICE Logistic(V x, Math math) {
    const V small = math.exp_of_negative(-math.abs(x)), larger = math.reciprocal(1.f + small),
            smaller = small * larger;
    of = x < 0.f ? smaller : larger;
    of_negative = x < 0.f ? larger : smaller;
  }
};

// activation(gate) * up. Backward also returns this product.
template <class A>
struct Gated {
  static constexpr int kInputs = 2, kOutputs = 3;
  template <class V, class Math>
  SHOESTRING_HOST_DEVICE void forward(const V (&in)[2], V (&out)[1], Math math) const {
    out[0] = A::at(in[0], math).value * in[1];
  }
  template <class V, class Math>
  SHOESTRING_HOST_DEVICE void backward(const V (&in)[3], V (&out)[3], Math math) const {
    const Activation<V> activation = A::at(in[1], math);
    out[0] = in[0] * in[2] * activation.slope;
    out[1] = in[0] * activation.value;
    out[2] = activation.value * in[2];
  }
};

// activation(x). Backward also returns this value.
template <class A>
struct Ungated {
  static constexpr int kInputs = 1, kOutputs = 2;
  template <class V, class Math>
  SHOESTRING_HOST_DEVICE void forward(const V (&in)[1], V (&out)[1], Math math) const {
    out[0] = A::at(in[0], math).value;
  }
  template <class V, class Math>
  SHOESTRING_HOST_DEVICE void backward(const V (&in)[2], V (&out)[2], Math math) const {
    const Activation<V> activation = A::at(in[1], math);
    out[0] = in[0] * activation.slope;
    out[1] = activation.value;
  }
};

}  // namespace shoestring::kernels
