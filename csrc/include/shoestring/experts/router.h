#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <ostream>
#include <string>

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <shoestring/core/export.h>
#include <shoestring/experts/ops.h>

namespace shoestring::nn {

struct RouterOptions {
  RouterOptions(int64_t features, int64_t experts, int64_t top_k)
      : features_(features), experts_(experts), top_k_(top_k) {}
  /// Size of the last dimension of the input.
  TORCH_ARG(int64_t, features);
  /// Number of experts.
  TORCH_ARG(int64_t, experts);
  /// Number of experts of a token.
  TORCH_ARG(int64_t, top_k);
  /// These have the meaning that they have in MoeRouteOptions.
  TORCH_ARG(std::string, score) = "softmax";
  TORCH_ARG(bool, renormalize) = false;
  TORCH_ARG(int64_t, groups) = 1;
  TORCH_ARG(int64_t, top_groups) = 1;
  TORCH_ARG(double, scale) = 1.0;
  /// The step by which update_bias changes the bias of an expert. 0: the router has no bias.
  TORCH_ARG(double, bias_rate) = 0.0;
};

/// Chooses the experts of each token: moe_route of the logits x weight^T. The logits are computed in fp32, or
/// in fp64 for fp64 inputs, also under autocast.
///
/// With bias_rate > 0, the router has a bias that keeps the experts equally busy without a loss (Wang et al.
/// 2024, arXiv 2408.15664). The bias is added to the scores for the choice alone. In training mode, forward
/// counts the tokens of each expert; the second run of a checkpoint does not count. Call update_bias() after
/// each step of the optimizer.
class SHOESTRING_API RouterImpl : public torch::nn::Cloneable<RouterImpl> {
 public:
  RouterImpl(int64_t features, int64_t experts, int64_t top_k)
      : RouterImpl(RouterOptions(features, experts, top_k)) {}
  explicit RouterImpl(const RouterOptions& options);

  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;
  /// Converts the weight. The bias stays in fp32, and the counts stay integers.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  using torch::nn::Module::to;

  /// Routes the tokens of x (..., features). mask (...), bool: true for the tokens that count.
  MoeRoute forward(const at::Tensor& x, const std::optional<at::Tensor>& mask = std::nullopt);

  /// Raises the bias of experts with fewer tokens than the mean since the last call by bias_rate, and lowers
  /// it for those with more. Then subtracts the mean from the bias, and sets the counts to 0.
  void update_bias();
  /// The same with the counts of all processes. `sum_over_ranks` returns the elementwise sum of an int64
  /// tensor over the processes, in this tensor or in another. All processes must call it.
  void update_bias(const std::function<at::Tensor(at::Tensor)>& sum_over_ranks);

  RouterOptions options;
  at::Tensor weight;  ///< (experts, features)
  at::Tensor bias;    ///< buffer (experts), fp32; undefined without bias_rate
  at::Tensor counts;  ///< buffer (experts), int64: tokens since update_bias; undefined without bias_rate

 private:
  void keep_buffers(const at::Tensor& bias_was, const at::Tensor& counts_was);
};
TORCH_MODULE(Router);

}  // namespace shoestring::nn
