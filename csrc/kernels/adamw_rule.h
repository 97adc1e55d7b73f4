#pragma once

// AdamW (Loshchilov and Hutter, arXiv 1711.05101) for one element, or one vector of elements: the rule that the
// kernels of every device share.

#if defined(__CUDACC__)
#define SHOESTRING_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define SHOESTRING_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace shoestring::kernels {

struct AdamWRule {
  float gradient_scale;   // -1 to maximise
  float decay;            // 1 - lr * weight_decay, applied before the update
  float one_minus_beta1;
  float beta2, one_minus_beta2;
  float step_size;        // lr / (1 - beta1^step)
  float inverse_bias2;    // 1 / sqrt(1 - beta2^step)
  float eps;

  template <class V, class Sqrt>
  SHOESTRING_HOST_DEVICE void operator()(V& param, V grad, V& exp_avg, V& exp_avg_sq, Sqrt sqrt) const {
    grad = grad * gradient_scale;
    exp_avg = exp_avg + (grad - exp_avg) * one_minus_beta1;
    exp_avg_sq = exp_avg_sq * beta2 + grad * grad * one_minus_beta2;
    param = param * decay - step_size * (exp_avg / (sqrt(exp_avg_sq) * inverse_bias2 + eps));
  }
};

}  // namespace shoestring::kernels
