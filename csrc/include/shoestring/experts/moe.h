#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <tuple>

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <shoestring/blocks/gated_mlp.h>
#include <shoestring/core/export.h>
#include <shoestring/experts/experts.h>
#include <shoestring/experts/router.h>

namespace shoestring::nn {

struct MoEOptions {
  MoEOptions(int64_t features, int64_t hidden, int64_t experts, int64_t top_k)
      : features_(features), hidden_(hidden), experts_(experts), top_k_(top_k) {}
  /// Size of the last dimension of the input and of the result.
  TORCH_ARG(int64_t, features);
  /// Hidden features of each expert.
  TORCH_ARG(int64_t, hidden);
  /// Number of experts, and of those that each token has.
  TORCH_ARG(int64_t, experts);
  TORCH_ARG(int64_t, top_k);
  /// Hidden features of an MLP that all tokens share. 0: there is none.
  TORCH_ARG(int64_t, shared_hidden) = 0;
  /// See RouterOptions.
  TORCH_ARG(std::string, score) = "softmax";
  TORCH_ARG(bool, renormalize) = false;
  TORCH_ARG(int64_t, groups) = 1;
  TORCH_ARG(int64_t, top_groups) = 1;
  TORCH_ARG(double, scale) = 1.0;
  TORCH_ARG(double, bias_rate) = 0.0;
  /// See ExpertsOptions. The shared MLP has the same activation and biases, and no limit.
  TORCH_ARG(std::string, activation) = "silu";
  TORCH_ARG(std::optional<double>, limit) = std::nullopt;
  TORCH_ARG(bool, bias) = false;
  TORCH_ARG(bool, interleaved) = false;
  TORCH_ARG(bool, transposed) = false;
};

/// A mixture of experts: the weighted sum of the MLPs that the router chooses for each token, plus the shared
/// MLP, if there is one. It replaces GatedMLP in a layer. Example:
///
///     shoestring::nn::MoE moe(shoestring::nn::MoEOptions(64, 32, /*experts=*/8, /*top_k=*/2));
///     const auto [y, route] = moe(x);
///     const at::Tensor loss = loss_of(y) + 0.01 * route.balance + 0.001 * route.z;
class SHOESTRING_API MoEImpl : public torch::nn::Cloneable<MoEImpl> {
 public:
  MoEImpl(int64_t features, int64_t hidden, int64_t experts, int64_t top_k)
      : MoEImpl(MoEOptions(features, hidden, experts, top_k)) {}
  explicit MoEImpl(const MoEOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// Maps x (..., features) to a result of the same shape, and returns the route of the tokens beside it.
  /// mask (...), bool: true for the tokens that count. The others have no expert, but the shared MLP.
  std::tuple<at::Tensor, MoeRoute> forward(const at::Tensor& x,
                                           const std::optional<at::Tensor>& mask = std::nullopt);

  MoEOptions options;
  Router router{nullptr};
  Experts experts{nullptr};
  GatedMLP shared{nullptr};  ///< empty without shared_hidden
};
TORCH_MODULE(MoE);

/// Returns a mixture of experts in which each expert is a copy of a dense MLP, with a random router (sparse
/// upcycling, Komatsuzaki et al. 2022, arXiv 2212.05055). The weights of a token's experts are renormalised,
/// so the result equals that of the dense MLP within rounding. The new weights have the device, the dtype and
/// the mode of the dense ones, which must be neither quantised nor adapted.
SHOESTRING_API MoE upcycle(const GatedMLP& dense, int64_t experts, int64_t top_k);

}  // namespace shoestring::nn
