#pragma once

#include <cstdint>
#include <ostream>

#include <torch/nn/cloneable.h>
#include <torch/nn/options/linear.h>
#include <torch/nn/pimpl.h>

#include <shoestring/core/export.h>
#include <shoestring/gemm/ops.h>

namespace shoestring::nn {

/// torch::nn::Linear that computes shoestring::linear. It has the options, the parameters and the
/// initialisation of torch::nn::Linear.
class SHOESTRING_API LinearImpl : public torch::nn::Cloneable<LinearImpl> {
 public:
  LinearImpl(int64_t in_features, int64_t out_features)
      : LinearImpl(torch::nn::LinearOptions(in_features, out_features)) {}
  explicit LinearImpl(const torch::nn::LinearOptions& options);

  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;
  at::Tensor forward(const at::Tensor& x);
  /// Returns forward(x) + residual, added in the same product.
  at::Tensor forward_with_residual(const at::Tensor& x, const at::Tensor& residual);

  torch::nn::LinearOptions options;
  at::Tensor weight;  ///< (out_features, in_features)
  at::Tensor bias;    ///< (out_features); undefined if options.bias() is false
};
TORCH_MODULE(Linear);

}  // namespace shoestring::nn
