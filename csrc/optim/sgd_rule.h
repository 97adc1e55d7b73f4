#pragma once

#include "optim/optimizer_table.h"

namespace shoestring::kernels {

struct SGDOptions;

// SGD with momentum as torch.optim.SGD has it, after Sutskever et al. (ICML 2013): weight decay is added to
// the gradient, the first gradient becomes the buffer undamped, and the learning rate is no part of the
// buffer.
struct alignas(16) SGDRule {
  static constexpr const char* kName = "sgd";
  static constexpr int kMoments = 1;  // momentum_buffer
  static constexpr bool kSigned[] = {true};
  using Options = SGDOptions;

  float scale, decay;      // of the gradient (negative to maximise), and of the weight that is added to it
  float momentum, gain;    // of the buffer and the gradient in the new buffer
  float buffer, gradient;  // how much of the new buffer and of the gradient is subtracted

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
