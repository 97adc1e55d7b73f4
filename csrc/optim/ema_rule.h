#pragma once

#include "optim/optimizer_table.h"

namespace shoestring::kernels {

struct EmaOptions;

// The rule of a running mean of gradients. It overwrites parameters with the mean, or with Nesterov's
// look-ahead. Optimizers that need more than a rule begin with it.
struct alignas(16) EmaRule {
  static constexpr const char* kName = "ema";
  static constexpr int kMoments = 1;  // the moment exp_avg
  static constexpr bool kSigned[] = {true};
  using Options = EmaOptions;

  // Decay of the mean; (1 - beta) * factor of the gradient, negative to maximise.
  float beta, gradient;
  float mean, own;  // weights of the new mean and of the gradient in the result

  template <class V, class Math>
  SHOESTRING_HOST_DEVICE void operator()(V& param, V grad, V (&moments)[1], Math math) const {
    V& exp_avg = moments[0];
    exp_avg = math.fma(exp_avg, beta, grad * gradient);
    param = math.fma(exp_avg, mean, grad * own);
  }

  SHOESTRING_HOST_DEVICE float keeps(int) const { return beta; }

  SHOESTRING_HOST_DEVICE void for_codes(const float (&scales)[1]) { beta *= scales[0]; }
};

struct EmaOptions : StepOptions {
  double beta;
  bool nesterov;

  SHOESTRING_HOST_DEVICE EmaRule rule(float) const {
    const double rate = this->rate(), gradient = (1 - beta) * (maximize ? -factor() : factor());
    return {static_cast<float>(beta), static_cast<float>(gradient),
            static_cast<float>(nesterov ? rate * beta : rate),
            static_cast<float>(nesterov ? rate * gradient : 0)};
  }
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::OptimizerTable<kernels::EmaRule>, ema)
