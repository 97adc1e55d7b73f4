#pragma once

#include "optim/optimizer_table.h"

namespace shoestring::kernels {

struct ApplyOptions;

// The rule that applies a known update, which takes the place of the gradient. Optimizers that need more than
// a rule end with it, and so support every rounding of weights.
struct alignas(8) ApplyRule {
  static constexpr const char* kName = "apply";
  static constexpr int kMoments = 0;
  static constexpr bool kSigned[1] = {};
  using Options = ApplyOptions;

  float decay;  // 1 - lr * weight_decay
  float step;   // -lr * factor of the update; positive to maximise

  template <class V, class Math>
  SHOESTRING_HOST_DEVICE void operator()(V& param, V update, V (&)[1], Math math) const {
    param = math.fma(param, decay, update * step);
  }

  SHOESTRING_HOST_DEVICE float keeps(int) const { return 0; }

  SHOESTRING_HOST_DEVICE void for_codes(const float (&)[1]) {}
};

struct ApplyOptions : StepOptions {
  SHOESTRING_HOST_DEVICE ApplyRule rule(float) const {
    const double rate = this->rate(), factor = this->factor();
    return {static_cast<float>(1 - rate * weight_decay),
            static_cast<float>((maximize ? rate : -rate) * factor)};
  }
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::OptimizerTable<kernels::ApplyRule>, apply)
