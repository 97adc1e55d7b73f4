#pragma once

// The operators of adapters.

#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <shoestring/core/export.h>
#include <shoestring/quantization/ops.h>

namespace shoestring {

/// A frozen linear layer, optionally with a LoRA adapter.
struct LoraWeight {
  LoraWeight(at::Tensor weight) : weight_(std::move(weight)) {}
  /// (out_features, in_features): a dense weight in x's dtype or, if absmax is given, the codes of a
  /// quantised weight.
  TORCH_ARG(at::Tensor, weight);
  TORCH_ARG(std::optional<at::Tensor>, absmax) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, nested) = std::nullopt;
  TORCH_ARG(QuantizeOptions, quantize) = {};
  /// (out_features). bias, lora_A, lora_B, gain and low_scale may have any floating-point dtype.
  TORCH_ARG(std::optional<at::Tensor>, bias) = std::nullopt;
  /// lora_A (rank, in_features) and lora_B (out_features, rank). Give both or neither.
  TORCH_ARG(std::optional<at::Tensor>, lora_A) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, lora_B) = std::nullopt;
  /// Factor of the low-rank product: alpha / rank, or alpha / sqrt(rank) for rsLoRA.
  TORCH_ARG(double, scaling) = 1;
  /// (out_features): a factor for the output before the bias is added. For DoRA it is magnitude /
  /// lora_weight_norm. An element that is 0 receives a gradient of 0.
  TORCH_ARG(std::optional<at::Tensor>, gain) = std::nullopt;
  /// (tokens, rank): a factor for x lora_A^T that receives no gradient. Zeros disable an adapter for a token.
  TORCH_ARG(std::optional<at::Tensor>, low_scale) = std::nullopt;
};

/// Operations on the input x of one or more LoraWeight layers before the layers read it.
struct LoraInput {
  /// If given, the layers read silu(gate) * x, as in SwiGLU's down projection. silu(gate) and silu(gate) * x
  /// are not saved for backward.
  TORCH_ARG(std::optional<at::Tensor>, gate) = std::nullopt;
  /// dropout is the probability of dropping an element of the input of the lora_A matrices. seed, one int64
  /// on x's device, is the seed of the dropout mask. seed is only given with dropout.
  TORCH_ARG(double, dropout) = 0;
  TORCH_ARG(std::optional<at::Tensor>, seed) = std::nullopt;
};

/// Computes `gain * (x W^T + scaling * (x lora_A^T) lora_B^T) + bias` for x (..., in_features), in x's dtype.
/// x, gate, bias, lora_A, lora_B and gain receive gradients. x is saved once for backward.
SHOESTRING_API at::Tensor lora_linear(const at::Tensor& x, const LoraWeight& layer,
                                      const LoraInput& input = {});

/// Computes lora_linear for several layers with the same input, such as the query, key and value projections.
/// One matrix product serves all lora_A matrices, and the gradients of x are summed once.
SHOESTRING_API std::vector<at::Tensor> lora_linear_group(const at::Tensor& x,
                                                         const std::vector<LoraWeight>& layers,
                                                         const LoraInput& input = {});

/// Returns the norms of the rows of W + scaling * lora_B lora_A, (out_features) in fp32 (fp64 for fp64). DoRA
/// (arXiv 2402.09353) divides its magnitudes by these norms. Allocates no temporary of W's size. Not
/// differentiable.
SHOESTRING_API at::Tensor lora_weight_norm(const LoraWeight& layer);

}  // namespace shoestring
