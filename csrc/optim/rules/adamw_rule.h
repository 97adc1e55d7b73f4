#pragma once

#include "optim/optimizer_table.h"

namespace shoestring::kernels {

struct AdamWOptions;

// The update rule of AdamW (Loshchilov and Hutter, arXiv 1711.05101).
struct alignas(16) AdamWRule {
  static constexpr const char* kName = "adamw";
  static constexpr int kMoments = 2;  // AdamW has two moments: exp_avg and exp_avg_sq
  static constexpr bool kSigned[] = {true, false};
  using Options = AdamWOptions;

  float decay;  // factor of the weight: 1 - lr * weight_decay, applied before the update
  float beta1, beta2;
  // Factor of the gradient in exp_avg: (1 - beta1) * clip_coef / grad_scale, negated if the objective is
  // maximised.
  float gradient;
  // Factor of the gradient before it is squared for exp_avg_sq: sqrt(1 - beta2) * clip_coef / grad_scale.
  float gradient_squared_root;
  float step;           // factor of the update: -lr / (1 - beta1^step)
  float inverse_bias2;  // bias correction of sqrt(exp_avg_sq): 1 / sqrt(1 - beta2^step)
  float eps;

  template <class V, class Math>
  SHOESTRING_HOST_DEVICE void operator()(V& param, V grad, V (&moments)[2], Math math) const {
    V& exp_avg = moments[0];
    V& exp_avg_sq = moments[1];
    const V root = grad * gradient_squared_root;
    exp_avg = math.fma(exp_avg, beta1, grad * gradient);
    exp_avg_sq = math.fma(exp_avg_sq, beta2, root * root);
    const V update = math.divide(exp_avg, math.sqrt(exp_avg_sq) * inverse_bias2 + eps);
    param = math.fma(param, decay, update * step);
  }

  SHOESTRING_HOST_DEVICE float keeps(int k) const { return k == 0 ? beta1 : beta2; }

  // The fast square root returns zero for a second moment below 1.2e-38. eps is therefore at least the root
  // of 1.2e-38, so that an update can become too small, but not explode.
  SHOESTRING_HOST_DEVICE void for_codes(const float (&scales)[2]) {
    beta1 *= scales[0];
    beta2 *= scales[1];
    eps = fmaxf(eps, 1.1e-19f);
  }
};

struct AdamWOptions : StepOptions {
  double beta1, beta2, eps;

  SHOESTRING_HOST_DEVICE AdamWRule rule(float step) const {
    const double rate = this->rate(), factor = this->factor();
    const double bias1 = 1 - pow(beta1, step), bias2 = 1 - pow(beta2, step);
    return {static_cast<float>(1 - rate * weight_decay),
            static_cast<float>(beta1),
            static_cast<float>(beta2),
            static_cast<float>((maximize ? beta1 - 1 : 1 - beta1) * factor),
            static_cast<float>(sqrt(1 - beta2) * factor),
            static_cast<float>(-rate / bias1),
            static_cast<float>(1 / sqrt(bias2)),
            static_cast<float>(eps)};
  }
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::OptimizerTable<kernels::AdamWRule>, adamw)
