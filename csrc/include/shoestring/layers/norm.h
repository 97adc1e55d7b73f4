#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <tuple>

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <shoestring/core/export.h>
#include <shoestring/layers/ops.h>

namespace shoestring::nn {

/// shoestring::rms_norm as a module. The weight starts at 1 - offset.
class SHOESTRING_API RMSNormImpl : public torch::nn::Cloneable<RMSNormImpl> {
 public:
  explicit RMSNormImpl(int64_t features, RMSNormOptions options = RMSNormOptions(1e-6));

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// Normalises x (..., features) and returns a tensor of x's shape and dtype.
  at::Tensor forward(const at::Tensor& x);
  /// Returns forward(x + residual) and the sum x + residual.
  std::tuple<at::Tensor, at::Tensor> forward_with_residual(const at::Tensor& x, const at::Tensor& residual);

  int64_t features;
  RMSNormOptions options;
  at::Tensor weight;  ///< (features)
};
TORCH_MODULE(RMSNorm);

struct LayerNormOptions {
  explicit LayerNormOptions(int64_t features) : features_(features) {}
  TORCH_ARG(int64_t, features);
  TORCH_ARG(double, eps) = 1e-5;
  TORCH_ARG(bool, bias) = true;
};

/// shoestring::layer_norm as a module. The weight starts at one and the optional bias at zero.
class SHOESTRING_API LayerNormImpl : public torch::nn::Cloneable<LayerNormImpl> {
 public:
  explicit LayerNormImpl(int64_t features) : LayerNormImpl(LayerNormOptions(features)) {}
  explicit LayerNormImpl(const LayerNormOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// Normalises x (..., features) and returns a tensor of x's shape and dtype.
  at::Tensor forward(const at::Tensor& x);
  /// Returns forward(x + residual) and the sum x + residual.
  std::tuple<at::Tensor, at::Tensor> forward_with_residual(const at::Tensor& x, const at::Tensor& residual);

  LayerNormOptions options;
  at::Tensor weight, bias;  ///< (features); bias is undefined if options.bias is false
};
TORCH_MODULE(LayerNorm);

}  // namespace shoestring::nn
