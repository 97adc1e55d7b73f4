#pragma once

// Parts of the training of diffusion models.

#include <string>
#include <utility>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <shoestring/core/export.h>

namespace shoestring::diffusion {

struct SHOESTRING_API MinSnrOptions {
  MinSnrOptions(std::string prediction = "epsilon") : prediction_(std::move(prediction)) {}
  /// The quantity that the model predicts, and whose mean squared error is weighted: "epsilon", "x0" or "v".
  TORCH_ARG(std::string, prediction);
  /// Limit of the signal-to-noise ratio; above 0.
  TORCH_ARG(double, gamma) = 5.0;
};

/// Returns the Min-SNR weights of timesteps (arXiv 2303.09556), fp32 in the shape of `timesteps`. The Python
/// counterpart is shoestring.diffusion.min_snr_weights. Example:
///
///     const at::Tensor weights = min_snr_weights(alphas_cumprod, timesteps, MinSnrOptions("v"));
///     const at::Tensor loss = ((v - target).square().flatten(1).mean(1) * weights).mean();
///
/// With a = alphas_cumprod[t] and SNR = a / (1 - a), the weight of the squared error in each quantity is
///
/// - epsilon: min(SNR, gamma) / SNR = min(1, gamma (1 - a) / a)
/// - x0:      min(SNR, gamma)
/// - v:       min(SNR, gamma) / (SNR + 1) = min(a, gamma (1 - a))
///
/// so that all three are the same loss of x0. They are computed in fp64 by the formulas on the right, which
/// are finite at SNR = 0 (a schedule with zero terminal SNR) and at a = 1.
///
/// alphas_cumprod: fp64, fp32, bf16 or fp16 (T,). fp64 is best, because 1 - a cancels. timesteps: int64 or
/// int32, any shape, on the same device. Throws c10::ValueError if an argument does not fit. On the CPU,
/// values outside [0, 1] and timesteps outside [0, T) are errors as well.
SHOESTRING_API at::Tensor min_snr_weights(const at::Tensor& alphas_cumprod, const at::Tensor& timesteps,
                                          const MinSnrOptions& options = {});

}  // namespace shoestring::diffusion
