#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <shoestring/core/export.h>
#include <shoestring/experts/ops.h>

namespace shoestring::nn {

struct ExpertsOptions {
  ExpertsOptions(int64_t experts, int64_t features, int64_t hidden)
      : experts_(experts), features_(features), hidden_(hidden) {}
  /// Number of experts.
  TORCH_ARG(int64_t, experts);
  /// Size of the last dimension of the input and of the result.
  TORCH_ARG(int64_t, features);
  /// Hidden features of each expert.
  TORCH_ARG(int64_t, hidden);
  /// These have the meaning that they have in MoeExpertsOptions.
  TORCH_ARG(std::string, activation) = "silu";
  TORCH_ARG(std::optional<double>, limit) = std::nullopt;
  /// Whether the projections of the experts have biases.
  TORCH_ARG(bool, bias) = false;
  TORCH_ARG(bool, interleaved) = false;
  TORCH_ARG(bool, transposed) = false;
};

/// The gated MLPs of experts, with their weights in two stacks: moe_experts as a module. The parameters have
/// the names and layouts of the experts in Hugging Face's transformers. Each expert has the initial values of
/// torch::nn::Linear.
class SHOESTRING_API ExpertsImpl : public torch::nn::Cloneable<ExpertsImpl> {
 public:
  ExpertsImpl(int64_t experts, int64_t features, int64_t hidden)
      : ExpertsImpl(ExpertsOptions(experts, features, hidden)) {}
  explicit ExpertsImpl(const ExpertsOptions& options);

  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  /// Computes for each token of x (..., features) the weighted sum of its experts. index and weight
  /// (..., top_k): see MoeRoute.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& index, const at::Tensor& weight);

  ExpertsOptions options;
  at::Tensor gate_up_proj;       ///< (experts, 2 hidden, features), or (experts, features, 2 hidden)
  at::Tensor down_proj;          ///< (experts, features, hidden), or (experts, hidden, features)
  at::Tensor gate_up_proj_bias;  ///< (experts, 2 hidden); undefined without biases
  at::Tensor down_proj_bias;     ///< (experts, features); undefined without biases
};
TORCH_MODULE(Experts);

}  // namespace shoestring::nn
