#include <shoestring/losses/diffusion.h>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include "core/tensors.h"

namespace shoestring::losses {
namespace {

using at::Tensor;

constexpr const char* kMinSnrOp = "min_snr_weights";

void check_min_snr(const Tensor& alphas, const Tensor& timesteps, double gamma,
                   const std::string& prediction) {
  TORCH_CHECK_VALUE(is_supported_float(alphas.scalar_type()) && alphas.dim() == 1, kMinSnrOp,
                    ": alphas_cumprod: expected fp64, fp32, bf16 or fp16 of one dimension, received ",
                    alphas.scalar_type(), " of ", alphas.dim());
  const auto type = timesteps.scalar_type();
  TORCH_CHECK_VALUE(type == at::kLong || type == at::kInt, kMinSnrOp,
                    ": timesteps: expected int64 or int32, received ", type);
  TORCH_CHECK_VALUE(timesteps.device() == alphas.device(), kMinSnrOp,
                    ": alphas_cumprod: expected a tensor on the device of timesteps, ", timesteps.device(),
                    ", received one on ", alphas.device(), ". Move it there once, before the training.");
  TORCH_CHECK_VALUE(gamma > 0, kMinSnrOp, ": gamma: expected a number above 0, received ", gamma);
  TORCH_CHECK_VALUE(prediction == "epsilon" || prediction == "x0" || prediction == "v", kMinSnrOp,
                    ": prediction: expected \"epsilon\", \"x0\" or \"v\", received \"", prediction, "\"");
}

Tensor min_snr_of(const Tensor& alphas, const Tensor& timesteps, double gamma,
                  const std::string& prediction) {
  check_min_snr(alphas, timesteps, gamma, prediction);
  const Tensor a = alphas.detach().index_select(0, timesteps.flatten()).to(at::kDouble);
  // On other devices, the check would wait for the device.
  if (alphas.is_cpu()) {
    const bool fits = a.ge(0).logical_and_(a.le(1)).all().item<bool>();
    TORCH_CHECK_VALUE(fits, kMinSnrOp, ": alphas_cumprod: expected values in [0, 1], received others");
  }
  const Tensor noise = (1 - a) * gamma;
  Tensor weights;
  if (prediction == "epsilon") {
    weights = (noise / a).clamp_max(1);
  } else if (prediction == "x0") {
    weights = (a / (1 - a)).clamp_max(gamma);
  } else {
    weights = at::minimum(a, noise);
  }
  return weights.to(at::kFloat).view(timesteps.sizes());
}

Tensor min_snr_meta(const Tensor& alphas, const Tensor& timesteps, double gamma,
                    const std::string& prediction) {
  check_min_snr(alphas, timesteps, gamma, prediction);
  return at::empty_symint(timesteps.sym_sizes(), timesteps.options().dtype(at::kFloat));
}

// The kernels of ATen's operators are enough on every device.
TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) { m.impl("_min_snr_weights", min_snr_of); }
TORCH_LIBRARY_IMPL(shoestring, Meta, m) { m.impl("_min_snr_weights", min_snr_meta); }

}  // namespace
}  // namespace shoestring::losses

namespace shoestring::diffusion {

at::Tensor min_snr_weights(const at::Tensor& alphas_cumprod, const at::Tensor& timesteps,
                           const MinSnrOptions& options) {
  return losses::min_snr_of(alphas_cumprod, timesteps, options.gamma(), options.prediction());
}

}  // namespace shoestring::diffusion
