#pragma once

#include "optim/optimizer_table.h"

namespace shoestring::kernels {

struct ApplyOptions;

// The update rule of the operator apply_: param = param * (1 - lr * weight_decay) - lr * update. The update
// is passed in place of the gradient. Optimizers such as LAMB and Muon compute the update with other
// operators and call _apply_ last. So they support every rounding mode of bf16 weights.
struct alignas(8) ApplyRule {
  static constexpr const char* kName = "apply";
  static constexpr int kMoments = 0;
  static constexpr bool kSigned[1] = {};
  using Options = ApplyOptions;

  float decay;  // factor of the weight: 1 - lr * weight_decay
  float step;   // factor of the update: -lr * clip_coef / grad_scale; positive if the objective is maximised

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
