#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <ostream>

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/pimpl.h>

#include <shoestring/export.h>
#include <shoestring/nn/linear.h>
#include <shoestring/nn/norm.h>
#include <shoestring/ops.h>

namespace shoestring::nn {

struct AttentionOptions {
  AttentionOptions(int64_t features, int64_t num_heads) : features_(features), num_heads_(num_heads) {}
  /// Of the input and of the result.
  TORCH_ARG(int64_t, features);
  /// Of the queries; of keys and values num_kv_heads, a divisor of it, by default as many.
  TORCH_ARG(int64_t, num_heads);
  TORCH_ARG(std::optional<int64_t>, num_kv_heads) = std::nullopt;
  /// Features of a head of queries and keys, by default features / num_heads, and of a head of values, by
  /// default the same.
  TORCH_ARG(std::optional<int64_t>, head_dim) = std::nullopt;
  TORCH_ARG(std::optional<int64_t>, value_dim) = std::nullopt;
  /// Of what keys and values are made of in cross-attention; by default features.
  TORCH_ARG(std::optional<int64_t>, source_features) = std::nullopt;
  /// Whether q_proj, k_proj and v_proj have a bias, and whether o_proj has.
  TORCH_ARG(bool, bias) = false;
  TORCH_ARG(bool, out_bias) = false;
  /// Those of shoestring::AttentionOptions.
  TORCH_ARG(bool, causal) = false;
  using Window = std::array<int64_t, 2>;
  TORCH_ARG(Window, window) = { -1, -1 };
  TORCH_ARG(double, softcap) = 0.0;
  TORCH_ARG(std::optional<double>, scale) = std::nullopt;
  /// RMSNorm of each head of queries and keys, before the rotation and in one pass with it; Gemma's offset
  /// is 1.
  TORCH_ARG(bool, qk_norm) = false;
  TORCH_ARG(double, norm_eps) = 1e-6;
  TORCH_ARG(double, norm_offset) = 0.0;
  /// Those of shoestring::RopeOptions.
  TORCH_ARG(std::optional<int64_t>, rotary_dim) = std::nullopt;
  TORCH_ARG(bool, interleaved) = false;
  /// Whether each head has a learned sink, zeros to begin with.
  TORCH_ARG(bool, sinks) = false;
  /// The probability with which a probability is dropped, in training alone.
  TORCH_ARG(double, dropout_p) = 0.0;
  /// The projections' weights take no memory until load_model fills them: see shoestring::placeholder.
  TORCH_ARG(bool, placeholder) = false;
};

/// What a call of Attention has besides x.
struct AttentionInput {
  /// Keys and values are made of it: (batch, keys, source_features), packed (keys of all sequences,
  /// source_features).
  TORCH_ARG(std::optional<at::Tensor>, source) = std::nullopt;
  /// As for shoestring::rope; without cos and sin nothing is rotated. Not with a source.
  TORCH_ARG(std::optional<at::Tensor>, cos) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, sin) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, position_ids) = std::nullopt;
  /// Those of shoestring::AttentionOptions.
  TORCH_ARG(std::optional<at::Tensor>, bias) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, alibi_slopes) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, cu_seqlens_q) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, cu_seqlens_k) = std::nullopt;
};

/// Queries, keys and values projected, norms and rotation of each head, shoestring::attention, and a
/// projection back. The parameters' names are transformers', so that Llama's, Mistral's, Qwen's, Gemma's and
/// gpt-oss' attention loads as it is.
class SHOESTRING_API AttentionImpl : public torch::nn::Cloneable<AttentionImpl> {
 public:
  AttentionImpl(int64_t features, int64_t num_heads) : AttentionImpl(AttentionOptions(features, num_heads)) {}
  explicit AttentionImpl(const AttentionOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// x (batch, tokens, features) or, with cu_seqlens_q, (tokens of all sequences, features); so is the
  /// result.
  at::Tensor forward(const at::Tensor& x, const AttentionInput& input = {});

  AttentionOptions options;
  Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, o_proj{nullptr};
  RMSNorm q_norm{nullptr}, k_norm{nullptr};  // empty without qk_norm
  at::Tensor sinks;                          // (num_heads); undefined without

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(AttentionInput())})

 private:
  void check(const at::Tensor& x, const AttentionInput& input) const;
};
TORCH_MODULE(Attention);

}  // namespace shoestring::nn
