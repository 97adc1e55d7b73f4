#pragma once

#include "optim/optimizer_table.h"

namespace shoestring::kernels {

struct SGDOptions;

// The update rule of SGD with momentum, as in torch.optim.SGD, after Sutskever et al. (ICML 2013). Weight
// decay is an L2 penalty, added to the gradient. In the first step, the gradient becomes the momentum buffer
// without dampening. The momentum buffer does not contain the learning rate.
struct alignas(16) SGDRule {
  static constexpr const char* kName = "sgd";
  static constexpr int kMoments = 1;  // the update rule has one moment, momentum_buffer
  static constexpr bool kSigned[] = {true};
  using Options = SGDOptions;

  // scale: factor of the gradient, clip_coef / grad_scale, negated if the objective is maximised. decay:
  // weight_decay, the share of the weight that is added to the gradient.
  float scale, decay;
  float momentum, gain;  // factors of the old momentum buffer and of the gradient in the new momentum buffer
  // Factors of the new momentum buffer and of the gradient in the update, which is subtracted from the
  // parameter.
  float buffer, gradient;

  template <class V, class Math>
  SHOESTRING_HOST_DEVICE void operator()(V& param, V grad, V (&moments)[1], Math math) const {
    V& momentum_buffer = moments[0];
    const V whole = math.fma(grad, scale, param * decay);
    momentum_buffer = math.fma(momentum_buffer, momentum, whole * gain);
    param = param - math.fma(momentum_buffer, buffer, whole * gradient);
  }

  SHOESTRING_HOST_DEVICE float keeps(int) const { return momentum; }

  SHOESTRING_HOST_DEVICE void for_codes(const float (&scales)[1]) { momentum *= scales[0]; }
};

struct SGDOptions : StepOptions {
  double momentum, dampening;
  bool nesterov;

  SHOESTRING_HOST_DEVICE SGDRule rule(float step) const {
    const double rate = this->rate();
    return {static_cast<float>(maximize ? -factor() : factor()),
            static_cast<float>(weight_decay),
            static_cast<float>(step == 1 ? 0 : momentum),
            static_cast<float>(step == 1 ? 1 : 1 - dampening),
            static_cast<float>(nesterov ? rate * momentum : rate),
            static_cast<float>(nesterov ? rate : 0)};
  }
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::OptimizerTable<kernels::SGDRule>, sgd)
