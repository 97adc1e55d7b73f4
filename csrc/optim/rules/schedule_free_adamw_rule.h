#pragma once

#include "optim/optimizer_table.h"

namespace shoestring::kernels {

struct ScheduleFreeAdamWOptions;

// The update rule of Schedule-Free AdamW (Defazio et al., arXiv 2405.15682). The paper has three sequences:
// the average x, the point y at which gradients are taken, and the point z that the updates move. The
// parameter is y. The moment `offset` is z - y. The average x is not stored; it is y - offset (1 - beta1) /
// beta1.
struct alignas(16) ScheduleFreeAdamWRule {
  static constexpr const char* kName = "schedule_free_adamw";
  static constexpr int kMoments = 2;  // Schedule-Free AdamW has two moments: offset and exp_avg_sq
  static constexpr bool kSigned[] = {true, false};
  static constexpr bool kLong[] = {true, false};
  using Options = ScheduleFreeAdamWOptions;

  float weight_decay;
  float beta2;
  // Factor of the gradient in the update: clip_coef / grad_scale, negated if the objective is maximised.
  float gradient;
  // Factor of the gradient before it is squared for exp_avg_sq: sqrt(1 - beta2) * clip_coef / grad_scale.
  float gradient_squared_root;
  float inverse_bias2;  // bias correction of sqrt(exp_avg_sq): 1 / sqrt(1 - beta2^step)
  float eps;
  float averaged, kept;  // c, the weight of this step in the average x, and 1 - c
  // Factors of the update in y, lr (beta1 (1 - c) - 1), and in offset, -lr beta1 (1 - c).
  float step, offset_step;

  template <class V, class Math>
  SHOESTRING_HOST_DEVICE void operator()(V& param, V grad, V (&moments)[2], Math math) const {
    V& offset = moments[0];
    V& exp_avg_sq = moments[1];
    const V root = grad * gradient_squared_root;
    exp_avg_sq = math.fma(exp_avg_sq, beta2, root * root);
    const V scaled = math.divide(grad * gradient, math.sqrt(exp_avg_sq) * inverse_bias2 + eps);
    const V update = math.fma(param, weight_decay, scaled);
    param = math.fma(update, step, math.fma(offset, averaged, param));
    offset = math.fma(offset, kept, update * offset_step);
  }

  SHOESTRING_HOST_DEVICE float keeps(int k) const { return k == 0 ? kept : beta2; }

  // The fast square root returns zero for a second moment below 1.2e-38. eps is therefore at least the root
  // of 1.2e-38, so that an update can become too small, but not explode.
  SHOESTRING_HOST_DEVICE void for_codes(const float (&scales)[2]) {
    averaged *= scales[0];
    kept *= scales[0];
    beta2 *= scales[1];
    eps = fmaxf(eps, 1.1e-19f);
  }
};

struct ScheduleFreeAdamWOptions : StepOptions {
  double beta1, beta2, eps;
  double warmup_steps;

  // Returns the weight of a step in the average of the weights: w(step)^2 / (w(1)^2 + ... + w(step)^2), where
  // w(i) = min(1, i / warmup_steps).
  SHOESTRING_HOST_DEVICE double share(double step) const {
    const double w = warmup_steps;
    if (step < w) return 6 * step / ((step + 1) * (2 * step + 1));
    const double warmup = w > 0 ? (w + 1) * (2 * w + 1) / (6 * w) : 0;
    return 1 / (step - w + warmup);
  }

  SHOESTRING_HOST_DEVICE ScheduleFreeAdamWRule rule(float step) const {
    const double factor = this->factor(), c = share(step);
    const double rate = this->rate() * (step < warmup_steps ? step / warmup_steps : 1.0);
    return {static_cast<float>(weight_decay),
            static_cast<float>(beta2),
            static_cast<float>(maximize ? -factor : factor),
            static_cast<float>(sqrt(1 - beta2) * factor),
            static_cast<float>(1 / sqrt(1 - pow(beta2, step))),
            static_cast<float>(eps),
            static_cast<float>(c),
            static_cast<float>(1 - c),
            static_cast<float>(rate * (beta1 * (1 - c) - 1)),
            static_cast<float>(-rate * beta1 * (1 - c))};
  }
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::OptimizerTable<kernels::ScheduleFreeAdamWRule>, schedule_free_adamw)
