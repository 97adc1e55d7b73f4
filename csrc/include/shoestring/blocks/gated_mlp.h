#pragma once

#include <cstdint>
#include <ostream>
#include <string>

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <shoestring/adapters/adaptable_linear.h>
#include <shoestring/core/export.h>

namespace shoestring::nn {

struct GatedMLPOptions {
  GatedMLPOptions(int64_t features, int64_t hidden_features)
      : features_(features), hidden_features_(hidden_features) {}
  /// Size of the last dimension of the input and of the result.
  TORCH_ARG(int64_t, features);
  /// Output size of gate_proj and up_proj.
  TORCH_ARG(int64_t, hidden_features);
  /// Activation function: "silu" (Llama), "gelu_tanh" (Gemma) or "gelu" (the exact GELU).
  TORCH_ARG(std::string, activation) = "silu";
  /// Whether gate_proj, up_proj and down_proj have a bias.
  TORCH_ARG(bool, bias) = false;
  /// Projection weights allocate no memory until load_model fills them; see shoestring::placeholder.
  TORCH_ARG(bool, placeholder) = false;
};

/// Computes down_proj(activation(gate_proj(x)) * up_proj(x)). Activation and product (SwiGLU or GeGLU) are
/// one kernel in forward and one in backward. With "silu" and a frozen weight of down_proj, the input of
/// down_proj is not saved for backward. The parameters have the names of Hugging Face's transformers.
class SHOESTRING_API GatedMLPImpl : public torch::nn::Cloneable<GatedMLPImpl> {
 public:
  GatedMLPImpl(int64_t features, int64_t hidden_features)
      : GatedMLPImpl(GatedMLPOptions(features, hidden_features)) {}
  explicit GatedMLPImpl(const GatedMLPOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// Maps x (..., features) to a result of the same shape.
  at::Tensor forward(const at::Tensor& x);

  GatedMLPOptions options;
  AdaptableLinear gate_proj{nullptr}, up_proj{nullptr}, down_proj{nullptr};
};
TORCH_MODULE(GatedMLP);

}  // namespace shoestring::nn
