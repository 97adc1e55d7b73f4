#pragma once

// AdamW (Loshchilov and Hutter, arXiv 1711.05101) for one element, or one vector of elements: the rule that the
// kernels of every device share.

#include <math.h>

#include "kernels/host_device.h"

namespace shoestring::kernels {

struct alignas(16) AdamWRule {
  float decay;  // 1 - lr * weight_decay, applied before the update
  float beta1, beta2;
  float gradient;               // 1 - beta1, negative to maximise; times what scales the gradient
  float gradient_squared_root;  // of 1 - beta2; times what scales the gradient
  float step_size;              // lr / (1 - beta1^step)
  float inverse_bias2;          // 1 / sqrt(1 - beta2^step)
  float eps;

  template <class V, class Math>
  SHOESTRING_HOST_DEVICE void operator()(V& param, V grad, V& exp_avg, V& exp_avg_sq, Math math) const {
    const V root = grad * gradient_squared_root;
    exp_avg = exp_avg * beta1 + grad * gradient;
    exp_avg_sq = exp_avg_sq * beta2 + root * root;
    param = param * decay - step_size * math.divide(exp_avg, math.sqrt(exp_avg_sq) * inverse_bias2 + eps);
  }
};

// A step's numbers. Those behind pointers are one fp32 each, in the memory of the device that steps; null: none.
struct AdamWOptions {
  double lr, beta1, beta2, eps, weight_decay;
  bool maximize;
  const float* lr_tensor;   // in place of lr
  const float* grad_scale;  // gradients are divided by it
  const float* clip_coef;   // and multiplied by it
  const float* found_inf;   // the step is skipped where it is not zero

  SHOESTRING_HOST_DEVICE bool skips() const { return found_inf != nullptr && *found_inf != 0; }

  // The rule of step number `step`, counted from one.
  SHOESTRING_HOST_DEVICE AdamWRule rule(float step) const {
    const double rate = lr_tensor != nullptr ? *lr_tensor : lr;
    double factor = clip_coef != nullptr ? *clip_coef : 1.0;
    if (grad_scale != nullptr) factor /= *grad_scale;
    const double bias1 = 1 - pow(beta1, step), bias2 = 1 - pow(beta2, step);
    return {static_cast<float>(1 - rate * weight_decay),
            static_cast<float>(beta1),
            static_cast<float>(beta2),
            static_cast<float>((maximize ? beta1 - 1 : 1 - beta1) * factor),
            static_cast<float>(sqrt(1 - beta2) * factor),
            static_cast<float>(rate / bias1),
            static_cast<float>(1 / sqrt(bias2)),
            static_cast<float>(eps)};
  }
};

}  // namespace shoestring::kernels
