#pragma once

#include "optim/optimizer_table.h"

namespace shoestring::kernels {

struct EmaOptions;

// The update rule of the operator _ema_. It updates exp_avg, the running mean of gradients, and overwrites
// the parameter with lr * exp_avg. With Nesterov momentum, it overwrites the parameter with lr * (beta *
// exp_avg
// + (1 - beta) * gradient). Optimizers such as Muon call _ema_ first and process its result.
struct alignas(16) EmaRule {
  static constexpr const char* kName = "ema";
  static constexpr int kMoments = 1;  // the update rule has one moment, exp_avg
  static constexpr bool kSigned[] = {true};
  using Options = EmaOptions;

  // beta: decay of exp_avg. gradient: weight of the gradient in exp_avg, (1 - beta) * clip_coef / grad_scale,
  // negated if the objective is maximised.
  float beta, gradient;
  float mean, own;  // weights of exp_avg and of the gradient in the value that the parameter receives

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
