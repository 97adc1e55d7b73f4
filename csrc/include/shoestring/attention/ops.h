#pragma once

// The operators of attention.

#include <array>
#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <shoestring/core/export.h>

namespace shoestring {

struct AttentionOptions {
  /// If true, a query attends only to keys up to its own position. The last query is aligned with the last
  /// key.
  TORCH_ARG(bool, causal) = false;
  /// How many keys to the left and to the right of its own position a query attends to; -1 means all. The
  /// last query is aligned with the last key.
  using WindowSize = std::array<int64_t, 2>;
  TORCH_ARG(WindowSize, window_size) = { -1, -1 };
  /// If not 0, each score is replaced by softcap * tanh(score / softcap).
  TORCH_ARG(double, softcap) = 0.0;
  /// Factor for q k^T. The default is 1 / sqrt(head_dim).
  TORCH_ARG(std::optional<double>, scale) = std::nullopt;
  /// A tensor that is added to the scores, (batch, heads, queries, keys), where each size may be 1, and
  /// leading dimensions may be missing. It is floating-point, or bool with true for a key that is visible.
  /// For packed sequences: (heads, queries of all sequences, keys of the longest sequence). Differentiable.
  TORCH_ARG(std::optional<at::Tensor>, bias) = std::nullopt;
  /// (heads), (batch, heads) or, for packed sequences, (sequences, heads): slope * |i - j| is subtracted from
  /// the score of query i and key j. Receives no gradient.
  TORCH_ARG(std::optional<at::Tensor>, alibi_slopes) = std::nullopt;
  /// (heads): attention sinks. A sink is the score of an additional key of its head, and the value of this
  /// key is zero. Differentiable.
  TORCH_ARG(std::optional<at::Tensor>, sinks) = std::nullopt;
  /// (sequences + 1) int32 offsets on q's device. If given, q, k and v are packed: (tokens of all sequences,
  /// heads, features). cu_seqlens_k defaults to cu_seqlens_q.
  TORCH_ARG(std::optional<at::Tensor>, cu_seqlens_q) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, cu_seqlens_k) = std::nullopt;
  /// dropout_p is the probability of dropping an attention probability. seed, one int64 on q's device, is the
  /// seed of the dropout mask. seed is only given with dropout.
  TORCH_ARG(double, dropout_p) = 0;
  TORCH_ARG(std::optional<at::Tensor>, seed) = std::nullopt;
  /// If true, every run gives the same bits. If false, a call on CUDA may use PyTorch's cuDNN or flash
  /// attention operators, whose backward sums in no fixed order. The default is
  /// at::globalContext().deterministicAlgorithms().
  TORCH_ARG(std::optional<bool>, deterministic) = std::nullopt;
};

/// Computes softmax(scale q k^T) v for every head, block by block, so that memory is linear in the number of
/// tokens. q (batch, heads, tokens, head_dim), k and v (batch, kv heads, keys, features), all of one dtype;
/// heads is a multiple of kv heads. As in torch's scaled_dot_product_attention, inputs may also be (heads,
/// tokens, features) or (tokens, features), or have several leading dimensions, which are one batch. Sizes in
/// front of the tokens broadcast. The results then have these dimensions, too. The result is 0 for a query
/// that attends to no key. Differentiable once with respect to q, k, v, bias and sinks.
SHOESTRING_API at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const AttentionOptions& options = {});

struct AttentionResult {
  at::Tensor out;
  /// Log-sum-exp of the scores, including the sink: (batch, heads, tokens), or (heads, tokens) for packed
  /// sequences; fp32, or fp64 for fp64 inputs.
  at::Tensor lse;
};

/// Computes attention and the log-sum-exp of its scores. Both results are differentiable.
SHOESTRING_API AttentionResult attention_with_lse(const at::Tensor& q, const at::Tensor& k,
                                                  const at::Tensor& v, const AttentionOptions& options = {});

/// Assigns sequences to bins so that no bin holds more than `capacity` tokens, to build packed batches.
/// lengths (sequences), int64 on the CPU. Returns the index of each sequence's bin, counted from 0. The
/// algorithm is first-fit decreasing; it takes O(n log n) steps.
SHOESTRING_API at::Tensor pack_sequences(const at::Tensor& lengths, int64_t capacity);

}  // namespace shoestring
