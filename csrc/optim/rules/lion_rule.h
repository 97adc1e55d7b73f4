#pragma once

#include "optim/optimizer_table.h"

namespace shoestring::kernels {

struct LionOptions;

// The update rule of Lion (Chen et al., arXiv 2302.06675).
struct alignas(16) LionRule {
  static constexpr const char* kName = "lion";
  static constexpr int kMoments = 1;  // the update rule has one moment, exp_avg
  static constexpr bool kSigned[] = {true};
  using Options = LionOptions;

  float decay;  // factor of the weight: 1 - lr * weight_decay, applied before the update
  float step;   // -lr
  // Weights of exp_avg and of the gradient in the update: beta1 and (1 - beta1) * clip_coef / grad_scale.
  // gradient1 is negated if the objective is maximised.
  float beta1, gradient1;
  float beta2, gradient2;  // weights of exp_avg and of the gradient in the new exp_avg

  template <class V, class Math>
  SHOESTRING_HOST_DEVICE void operator()(V& param, V grad, V (&moments)[1], Math math) const {
    V& exp_avg = moments[0];
    param = math.fma(param, decay, math.sign(math.fma(exp_avg, beta1, grad * gradient1)) * step);
    exp_avg = math.fma(exp_avg, beta2, grad * gradient2);
  }

  SHOESTRING_HOST_DEVICE float keeps(int) const { return beta2; }

  SHOESTRING_HOST_DEVICE void for_codes(const float (&scales)[1]) {
    beta1 *= scales[0];
    beta2 *= scales[0];
  }
};

struct LionOptions : StepOptions {
  double beta1, beta2;

  SHOESTRING_HOST_DEVICE LionRule rule(float) const {
    const double rate = this->rate(), factor = maximize ? -this->factor() : this->factor();
    return {static_cast<float>(1 - rate * weight_decay),
            static_cast<float>(-rate),
            static_cast<float>(beta1),
            static_cast<float>((1 - beta1) * factor),
            static_cast<float>(beta2),
            static_cast<float>((1 - beta2) * factor)};
  }
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::OptimizerTable<kernels::LionRule>, lion)
