#pragma once

#include "optim/optimizer_table.h"

namespace shoestring::kernels {

struct AdEMAMixOptions;

// The update rule of AdEMAMix (Pagliardini et al., arXiv 2409.03137): AdamW with a second, slow mean of
// gradients. The slow mean has no bias correction.
struct alignas(16) AdEMAMixRule {
  static constexpr const char* kName = "ademamix";
  static constexpr int kMoments = 3;  // AdEMAMix has three moments: exp_avg, exp_avg_slow and exp_avg_sq
  static constexpr bool kSigned[] = {true, true, false};
  static constexpr bool kLong[] = {false, true, false};
  using Options = AdEMAMixOptions;

  float decay;  // factor of the weight: 1 - lr * weight_decay, applied before the update
  float beta1, beta2, beta3;
  // Weights of the gradient in the fast and in the slow mean: (1 - beta1) * factor and (1 - beta3) * factor.
  // Here factor is clip_coef / grad_scale, negated if the objective is maximised.
  float gradient1, gradient3;
  // Factor of the gradient before it is squared for exp_avg_sq: sqrt(1 - beta2) * clip_coef / grad_scale.
  float gradient_squared_root;
  // Factors in the update: -lr / (1 - beta1^step) for the fast mean, -lr * alpha for the slow mean.
  float fast, slow;
  float inverse_bias2;  // bias correction of sqrt(exp_avg_sq): 1 / sqrt(1 - beta2^step)
  float eps;

  template <class V, class Math>
  SHOESTRING_HOST_DEVICE void operator()(V& param, V grad, V (&moments)[3], Math math) const {
    const V root = grad * gradient_squared_root;
    moments[0] = math.fma(moments[0], beta1, grad * gradient1);
    moments[1] = math.fma(moments[1], beta3, grad * gradient3);
    moments[2] = math.fma(moments[2], beta2, root * root);
    const V mixed = math.fma(moments[1], slow, moments[0] * fast);
    param = math.fma(param, decay, math.divide(mixed, math.sqrt(moments[2]) * inverse_bias2 + eps));
  }

  SHOESTRING_HOST_DEVICE float keeps(int k) const { return k == 0 ? beta1 : k == 1 ? beta3 : beta2; }

  // The fast square root returns zero for a second moment below 1.2e-38. eps is therefore at least the root
  // of 1.2e-38, so that an update can become too small, but not explode.
  SHOESTRING_HOST_DEVICE void for_codes(const float (&scales)[3]) {
    beta1 *= scales[0];
    beta3 *= scales[1];
    beta2 *= scales[2];
    eps = fmaxf(eps, 1.1e-19f);
  }
};

struct AdEMAMixOptions : StepOptions {
  double beta1, beta2, beta3, alpha, eps;
  double t_alpha, t_beta3;  // steps over which alpha and beta3 rise; 0 if they are constant

  // Returns the decay of the slow mean. It rises from beta1 to beta3 over t_beta3 steps, such that the
  // half-life of the slow mean grows linearly.
  SHOESTRING_HOST_DEVICE double slow_beta(double step) const {
    if (step >= t_beta3) return beta3;
    const double from = log(beta1), to = log(beta3), share = step / t_beta3;
    return exp(from * to / ((1 - share) * to + share * from));
  }

  SHOESTRING_HOST_DEVICE AdEMAMixRule rule(float step) const {
    const double rate = this->rate(), factor = this->factor(), sign = maximize ? -factor : factor;
    const double beta3_now = slow_beta(step), alpha_now = step >= t_alpha ? alpha : alpha * step / t_alpha;
    return {static_cast<float>(1 - rate * weight_decay),
            static_cast<float>(beta1),
            static_cast<float>(beta2),
            static_cast<float>(beta3_now),
            static_cast<float>((1 - beta1) * sign),
            static_cast<float>((1 - beta3_now) * sign),
            static_cast<float>(sqrt(1 - beta2) * factor),
            static_cast<float>(-rate / (1 - pow(beta1, step))),
            static_cast<float>(-rate * alpha_now),
            static_cast<float>(1 / sqrt(1 - pow(beta2, step))),
            static_cast<float>(eps)};
  }
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::OptimizerTable<kernels::AdEMAMixRule>, ademamix)
