#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <ostream>

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/pimpl.h>

#include <shoestring/adapters/adaptable_linear.h>
#include <shoestring/attention/ops.h>
#include <shoestring/core/export.h>
#include <shoestring/layers/norm.h>

namespace shoestring::nn {

struct AttentionOptions {
  AttentionOptions(int64_t features, int64_t num_heads) : features_(features), num_heads_(num_heads) {}
  /// Size of the last dimension of the input and of the result.
  TORCH_ARG(int64_t, features);
  /// num_heads is the number of heads of the queries. num_kv_heads is the number of heads of keys and values.
  /// num_kv_heads must divide num_heads, and defaults to num_heads.
  TORCH_ARG(int64_t, num_heads);
  TORCH_ARG(std::optional<int64_t>, num_kv_heads) = std::nullopt;
  /// head_dim is the size of a head of queries and keys and defaults to features / num_heads. value_dim is
  /// the size of a head of values and defaults to head_dim.
  TORCH_ARG(std::optional<int64_t>, head_dim) = std::nullopt;
  TORCH_ARG(std::optional<int64_t>, value_dim) = std::nullopt;
  /// Size of the last dimension of the tensor from which cross-attention computes keys and values; defaults
  /// to features.
  TORCH_ARG(std::optional<int64_t>, source_features) = std::nullopt;
  /// bias: q_proj, k_proj and v_proj have a bias. out_bias: o_proj has a bias.
  TORCH_ARG(bool, bias) = false;
  TORCH_ARG(bool, out_bias) = false;
  /// causal, window_size, softcap and scale have the meaning that they have in shoestring::AttentionOptions.
  TORCH_ARG(bool, causal) = false;
  using WindowSize = std::array<int64_t, 2>;
  TORCH_ARG(WindowSize, window_size) = { -1, -1 };
  TORCH_ARG(double, softcap) = 0.0;
  TORCH_ARG(std::optional<double>, scale) = std::nullopt;
  /// Applies RMSNorm to each head of queries and keys before the rotation, in the same pass over memory.
  /// norm_offset is added to the weight of the norm; Gemma uses 1.
  TORCH_ARG(bool, qk_norm) = false;
  TORCH_ARG(double, norm_eps) = 1e-6;
  TORCH_ARG(double, norm_offset) = 0.0;
  /// rotary_dim and interleaved have the meaning that they have in shoestring::RopeOptions.
  TORCH_ARG(std::optional<int64_t>, rotary_dim) = std::nullopt;
  TORCH_ARG(bool, interleaved) = false;
  /// Whether each head has a learned attention sink: the score of an additional key whose value is zero. The
  /// sinks start at zero.
  TORCH_ARG(bool, sinks) = false;
  /// Probability of dropping an attention probability, in training only.
  TORCH_ARG(double, dropout_p) = 0.0;
  /// Projection weights allocate no memory until load_model fills them; see shoestring::placeholder.
  TORCH_ARG(bool, placeholder) = false;
};

/// Arguments of Attention's forward, other than x.
struct AttentionInput {
  /// Input of k_proj and v_proj in cross-attention: (batch, keys, source_features), or packed (keys of all
  /// sequences, source_features). Default: x, which is also the input of q_proj.
  TORCH_ARG(std::optional<at::Tensor>, source) = std::nullopt;
  /// cos and sin are the tables of the rotary embedding, and position_ids holds each token's row in the
  /// tables. They have the meaning that they have in shoestring::rope. Without cos and sin, heads are not
  /// rotated. cos and sin are not allowed with `source` (cross-attention).
  TORCH_ARG(std::optional<at::Tensor>, cos) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, sin) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, position_ids) = std::nullopt;
  /// bias, alibi_slopes and cu_seqlens have the meaning that they have in shoestring::AttentionOptions.
  TORCH_ARG(std::optional<at::Tensor>, bias) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, alibi_slopes) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, cu_seqlens_q) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, cu_seqlens_k) = std::nullopt;
};

/// Multi-head attention: projects queries, keys and values, normalises and rotates each head, calls
/// shoestring::attention and projects back. The parameters have the names of Hugging Face's transformers. The
/// attention weights of Llama, Mistral, Qwen, Gemma and gpt-oss therefore load without renaming.
class SHOESTRING_API AttentionImpl : public torch::nn::Cloneable<AttentionImpl> {
 public:
  AttentionImpl(int64_t features, int64_t num_heads) : AttentionImpl(AttentionOptions(features, num_heads)) {}
  explicit AttentionImpl(const AttentionOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// Maps x to a result of the same shape: (batch, tokens, features) or, with cu_seqlens_q, (tokens of all
  /// sequences, features).
  at::Tensor forward(const at::Tensor& x, const AttentionInput& input = {});

  AttentionOptions options;
  AdaptableLinear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, o_proj{nullptr};
  // Norms that are applied to each head of queries and keys; empty if options.qk_norm is false.
  RMSNorm q_norm{nullptr}, k_norm{nullptr};
  at::Tensor sinks;  ///< attention sink of each head, (num_heads); undefined if options.sinks is false

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(AttentionInput())})

 private:
  void check(const at::Tensor& x, const AttentionInput& input) const;
};
TORCH_MODULE(Attention);

}  // namespace shoestring::nn
