#pragma once

#include "optim/optimizer_table.h"

namespace shoestring::kernels {

struct AdEMAMixOptions;

// The update rule of AdEMAMix (Pagliardini et al., arXiv 2409.03137): AdamW with a second, slow mean of
// gradients. The slow mean has no bias correction.
struct alignas(16) AdEMAMixRule {
  static constexpr const char* kName = "ademamix";
  static constexpr int kMoments = 3;  // the moments exp_avg, exp_avg_slow and exp_avg_sq
  static constexpr bool kSigned[] = {true, true, false};
  static constexpr bool kLong[] = {false, true, false};
  using Options = AdEMAMixOptions;

  float decay;  // 1 - lr * weight_decay, applied before the update
  float beta1, beta2, beta3;
  // (1 - beta1), (1 - beta3), each times the factor of the gradient; negative to maximise.
  float gradient1, gradient3;
  float gradient_squared_root;  // sqrt(1 - beta2) * factor of the gradient
  float fast, slow;             // -lr / (1 - beta1^step), -lr alpha
  float inverse_bias2;          // 1 / sqrt(1 - beta2^step)
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

  // The lower bound of eps has the same reason as in AdamWRule.
  SHOESTRING_HOST_DEVICE void for_codes(const float (&scales)[3]) {
    beta1 *= scales[0];
    beta3 *= scales[1];
    beta2 *= scales[2];
    eps = fmaxf(eps, 1.1e-19f);
  }
};

struct AdEMAMixOptions : StepOptions {
  double beta1, beta2, beta3, alpha, eps;
  double t_alpha, t_beta3;  // number of steps of the schedule; 0 for no schedule

  // Returns the decay of the slow mean. It rises from beta1 to beta3 such that the mean's half-life grows
  // linearly.
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
