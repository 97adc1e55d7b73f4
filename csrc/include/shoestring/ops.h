#pragma once

#include <optional>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <shoestring/export.h>

namespace shoestring {

/// Which build of the CPU kernels runs: "plain", "avx2" or "avx512". The environment variable SHOESTRING_CPU names
/// another one at start.
SHOESTRING_API std::string cpu_capability();

/// Switches to another build; false, and no change, where this machine does not have it. For tests and comparisons.
SHOESTRING_API bool set_cpu_capability(const std::string& name);

struct LinearCrossEntropyOptions {
  /// Tokens with this target count neither in the loss nor in the mean.
  TORCH_ARG(int64_t, ignore_index) = -100;
  /// "mean" (over the tokens that count), "sum" or "none".
  TORCH_ARG(std::string, reduction) = "mean";
  /// In [0, 1): the share of the target's probability that is spread over the vocabulary.
  TORCH_ARG(double, label_smoothing) = 0.0;
  /// If not 0, logits become softcap * tanh(logits / softcap).
  TORCH_ARG(double, softcap) = 0.0;
  /// Bound on the chunk of logits that exists at a time, in MiB.
  TORCH_ARG(int64_t, workspace_mb) = 64;
};

/// Cross-entropy of `hidden @ weight.T + bias` against `target`, without the (tokens, vocab) logits ever existing.
/// hidden (..., features), weight (vocab, features), target (...) int64, bias (vocab). Returns fp32 for 16-bit inputs.
SHOESTRING_API at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                               const at::Tensor& target,
                                               const std::optional<at::Tensor>& bias = std::nullopt,
                                               const LinearCrossEntropyOptions& options = {});

}  // namespace shoestring
