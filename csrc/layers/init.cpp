#include <shoestring/layers/init.h>

#include <cmath>
#include <numbers>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "core/name_patterns.h"

namespace shoestring::nn::init {
namespace {

double normal_cdf(double x) { return (1 + std::erf(x / std::numbers::sqrt2)) / 2; }

}  // namespace

at::Tensor trunc_normal_(at::Tensor tensor, double mean, double std, double a, double b,
                         std::optional<at::Generator> generator) {
  TORCH_CHECK_VALUE(std > 0, "trunc_normal_: std: expected a number above 0, received ", std);
  TORCH_CHECK_VALUE(a < b, "trunc_normal_: b: expected a bound above a = ", a, ", received ", b);
  const at::NoGradGuard no_grad;
  // Uniform numbers between the values of the error function at the bounds go through its inverse.
  const double low = normal_cdf((a - mean) / std), high = normal_cdf((b - mean) / std);
  TORCH_CHECK_VALUE(low < high, "trunc_normal_: mean: expected a distribution with a share in [", a, ", ", b,
                    "], received mean ", mean, " with std ", std);
  tensor.uniform_(2 * low - 1, 2 * high - 1, std::move(generator)).erfinv_();
  return tensor.mul_(std * std::numbers::sqrt2).add_(mean).clamp_(a, b);
}

std::vector<std::string> depth_scaled_(torch::nn::Module& module, const std::vector<std::string>& patterns,
                                       int64_t layers) {
  TORCH_CHECK_VALUE(layers >= 1, "depth_scaled_: layers: expected a number of at least 1, received ", layers);
  const auto parameters = module.named_parameters();
  const std::vector<std::string> names = parameters.keys();
  std::vector<bool> chosen(names.size());
  for (const std::string& pattern : patterns) {
    for (const size_t i : matching("depth_scaled_", "patterns", pattern, names)) chosen[i] = true;
  }
  const at::NoGradGuard no_grad;
  std::vector<std::string> scaled;
  for (size_t i = 0; i < names.size(); ++i) {
    if (!chosen[i]) continue;
    parameters[names[i]].mul_(1 / std::sqrt(2.0 * static_cast<double>(layers)));
    scaled.push_back(names[i]);
  }
  return scaled;
}

}  // namespace shoestring::nn::init
