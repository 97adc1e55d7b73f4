#pragma once

// AdamW (Loshchilov and Hutter, arXiv 1711.05101) for one element, or one vector of elements: the rule that the
// kernels of every device share.

#include "kernels/host_device.h"

namespace shoestring::kernels {

struct AdamWRule {
  float decay;  // 1 - lr * weight_decay, applied before the update
  float beta1, beta2;
  float gradient;          // 1 - beta1, negative to maximise
  float gradient_squared;  // 1 - beta2
  float step_size;         // lr / (1 - beta1^step)
  float inverse_bias2;     // 1 / sqrt(1 - beta2^step)
  float eps;

  template <class V, class Sqrt>
  SHOESTRING_HOST_DEVICE void operator()(V& param, V grad, V& exp_avg, V& exp_avg_sq, Sqrt sqrt) const {
    exp_avg = exp_avg * beta1 + grad * gradient;
    exp_avg_sq = exp_avg_sq * beta2 + grad * grad * gradient_squared;
    param = param * decay - step_size * (exp_avg / (sqrt(exp_avg_sq) * inverse_bias2 + eps));
  }
};

}  // namespace shoestring::kernels
