#pragma once

#include <cstdint>
#include <ostream>
#include <string>

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <shoestring/export.h>
#include <shoestring/nn/linear.h>

namespace shoestring::nn {

struct GatedMLPOptions {
  GatedMLPOptions(int64_t features, int64_t hidden_features)
      : features_(features), hidden_features_(hidden_features) {}
  /// Of the input and of the result.
  TORCH_ARG(int64_t, features);
  /// Between the projections.
  TORCH_ARG(int64_t, hidden_features);
  /// "silu" (Llama), "gelu_tanh" (Gemma) or "gelu", which is exact.
  TORCH_ARG(std::string, activation) = "silu";
  /// Whether the projections have one.
  TORCH_ARG(bool, bias) = false;
  /// The projections' weights take no memory until load_model fills them: see shoestring::placeholder.
  TORCH_ARG(bool, placeholder) = false;
};

/// down_proj(activation(gate_proj(x)) * up_proj(x)), SwiGLU or GeGLU in one pass each way; of SwiGLU, where
/// down_proj's weight is frozen, backward keeps no product. The parameters' names are transformers'.
class SHOESTRING_API GatedMLPImpl : public torch::nn::Cloneable<GatedMLPImpl> {
 public:
  GatedMLPImpl(int64_t features, int64_t hidden_features)
      : GatedMLPImpl(GatedMLPOptions(features, hidden_features)) {}
  explicit GatedMLPImpl(const GatedMLPOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// (..., features)
  at::Tensor forward(const at::Tensor& x);

  GatedMLPOptions options;
  Linear gate_proj{nullptr}, up_proj{nullptr}, down_proj{nullptr};
};
TORCH_MODULE(GatedMLP);

}  // namespace shoestring::nn
