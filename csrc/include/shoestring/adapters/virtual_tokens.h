#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <shoestring/core/export.h>

namespace shoestring::nn {

struct PromptTokensOptions {
  PromptTokensOptions(int64_t tokens, int64_t features) : tokens_(tokens), features_(features) {}
  /// Number of trained tokens.
  TORCH_ARG(int64_t, tokens);
  /// Number of features of the model's embeddings.
  TORCH_ARG(int64_t, features);
};

/// Prompt tuning (arXiv 2104.08691): trained embeddings that stand before those of the input of a frozen
/// model. With the same seed, the initial values equal those of Python's shoestring.lora and of PEFT.
///
///     auto x = prompt(model->embed(ids));
///     auto seen = nn::before(mask, prompt->options.tokens(), 1);
///     auto loss = model->loss(x, seen, nn::before(labels, prompt->options.tokens(), -100));
class SHOESTRING_API PromptTokensImpl : public torch::nn::Cloneable<PromptTokensImpl> {
 public:
  PromptTokensImpl(int64_t tokens, int64_t features)
      : PromptTokensImpl(PromptTokensOptions(tokens, features)) {}
  explicit PromptTokensImpl(const PromptTokensOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  /// Maps embeddings (batch, n, features) to (batch, tokens + n, features), in the dtype of the embeddings.
  at::Tensor forward(const at::Tensor& embedded);

  /// Writes and reads adapter_config.json and adapter_model.safetensors in PEFT's format. load() raises
  /// ValueError, and changes nothing, if the files hold another method or other sizes.
  void save(const std::string& directory) const;
  void load(const std::string& directory);

  PromptTokensOptions options;
  at::Tensor embedding;  ///< (tokens, features), fp32
};
TORCH_MODULE(PromptTokens);

struct PrefixTokensOptions {
  PrefixTokensOptions(int64_t tokens, int64_t layers, int64_t heads, int64_t head_dim)
      : tokens_(tokens), layers_(layers), heads_(heads), head_dim_(head_dim) {}
  /// Number of trained tokens.
  TORCH_ARG(int64_t, tokens);
  /// Number of attention layers of the model, and heads and features of a head of their keys and values.
  TORCH_ARG(int64_t, layers);
  TORCH_ARG(int64_t, heads);
  TORCH_ARG(int64_t, head_dim);
  /// Whether two linear layers compute the prefix from trained tokens with heads * head_dim features. Files
  /// contain the computed prefix.
  TORCH_ARG(bool, projection) = false;
  /// Number of features between the two linear layers; default: heads * head_dim.
  TORCH_ARG(std::optional<int64_t>, hidden_size) = std::nullopt;
  /// Whether the keys and values start at zero. Otherwise they are drawn from a normal distribution, or
  /// computed by the initial projection.
  TORCH_ARG(bool, zero) = false;
};

/// Prefix tuning (arXiv 2101.00190): trained keys and values that stand before those of the input, in every
/// attention layer of a frozen model. Concatenate them along the tokens before shoestring::attention, whose
/// causal mask lets every query see them. With the same seed, the initial values equal those of Python's
/// shoestring.lora and of PEFT.
///
///     const auto parts = prefix(batch, q.scalar_type());
///     k = at::cat({parts[layer].keys, k}, 2);
///     v = at::cat({parts[layer].values, v}, 2);
///     auto y = shoestring::attention(q, k, v, AttentionOptions().causal(true));
class SHOESTRING_API PrefixTokensImpl : public torch::nn::Cloneable<PrefixTokensImpl> {
 public:
  /// Keys and values of one layer: (batch, heads, tokens, head_dim).
  struct Layer {
    at::Tensor keys, values;
  };

  explicit PrefixTokensImpl(const PrefixTokensOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  /// Returns the keys and values of every layer for a batch, in the given dtype.
  std::vector<Layer> forward(int64_t batch, at::ScalarType dtype = at::kFloat);
  /// Returns the prefix as files store it: (tokens, 2 * layers * heads * head_dim).
  at::Tensor values();

  /// Writes and reads adapter_config.json and adapter_model.safetensors in PEFT's format. load() raises
  /// ValueError, and changes nothing, if the files hold another method or other sizes. After load(), the
  /// prefix is trained itself, without a projection.
  void save(const std::string& directory) const;
  void load(const std::string& directory);

  PrefixTokensOptions options;
  /// (tokens, 2 * layers * heads * head_dim), or with projection (tokens, heads * head_dim), fp32
  at::Tensor embedding;
  /// The two layers of the projection; empty without one.
  torch::nn::Linear first{nullptr}, last{nullptr};
};
TORCH_MODULE(PrefixTokens);

/// Puts `tokens` columns of one value before t (batch, n): 1 for a mask of visible tokens, -100 for labels.
SHOESTRING_API at::Tensor before(const at::Tensor& t, int64_t tokens, const at::Scalar& value);

}  // namespace shoestring::nn
