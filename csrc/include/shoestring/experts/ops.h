#pragma once

// The operators of experts: the choice of experts for each token, and the order of tokens by expert.

#include <cstdint>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <shoestring/core/export.h>
#include <shoestring/quantization/ops.h>

namespace shoestring {

/// Options of moe_route.
struct MoeRouteOptions {
  /// The scores of the experts, by which experts are chosen. "softmax": the weights are the probabilities of
  /// the chosen experts (Mixtral, Qwen3, OLMoE). "sigmoid": the weights are the sigmoids of the logits
  /// (DeepSeek-V3, GLM-4.5). "topk_softmax": the weights are the softmax of the chosen logits alone
  /// (gpt-oss).
  TORCH_ARG(std::string, score) = "softmax";
  /// (experts), any floating-point dtype: added to the scores for the choice alone. The weights and the
  /// gradients do not depend on it.
  TORCH_ARG(std::optional<at::Tensor>, bias) = std::nullopt;
  /// If true, the weights of a token are divided by their sum. Changes nothing for "topk_softmax".
  TORCH_ARG(bool, renormalize) = false;
  /// The number of groups of equal size into which the experts are divided. Experts are chosen from the
  /// top_groups groups with the largest sum of their two best scores.
  TORCH_ARG(int64_t, groups) = 1;
  TORCH_ARG(int64_t, top_groups) = 1;
  /// A factor of the weights.
  TORCH_ARG(double, scale) = 1.0;
  /// (...), bool: the tokens that count, true for each of them. A token that does not count has no expert.
  TORCH_ARG(std::optional<at::Tensor>, mask) = std::nullopt;
};

/// The result of moe_route. `index` (..., top_k), int64: the chosen experts, the best first; -1 for tokens
/// that do not count. `weight` (..., top_k), the dtype of the logits; 0 for tokens that do not count.
/// `counts` (experts), int64: the number of tokens of each expert. `balance` and `z`, of shape () and fp32,
/// or fp64 for fp64 logits: the load-balancing loss and the z-loss, without their coefficients.
struct MoeRoute {
  at::Tensor index, weight, counts, balance, z;
};

/// Chooses the top_k best of the experts for each token, from router logits (..., experts) of fp32, fp64,
/// bf16 or fp16. Computes in fp32. Equal scores rank by the lowest index, and NaN ranks above all numbers.
/// weight, balance and z have gradients.
SHOESTRING_API MoeRoute moe_route(const at::Tensor& logits, int64_t top_k,
                                  const MoeRouteOptions& options = {});

/// The result of moe_sort, int64 tensors. A slot is an element of `index`, by its position in memory order:
/// with index (tokens, top_k), slot s belongs to token s / top_k. `order` (slots): the slots in the order of
/// their experts; those without an expert come last. `inverse` (slots): the place of each slot in `order`.
/// `offsets` (experts + 1): order[offsets[e]] to order[offsets[e + 1] - 1] are the slots of expert e.
struct MoeSort {
  at::Tensor order, inverse, offsets;
};

/// Sorts slots by their experts. index: int64 of any shape, with values in [0, experts), or -1 for no expert.
/// Slots of the same expert keep their order.
SHOESTRING_API MoeSort moe_sort(const at::Tensor& index, int64_t experts);

/// Options of grouped_linear.
struct GroupedLinearOptions {
  /// (slots), int64: the row of x that each slot multiplies. Without it, slot s is row s of x.
  TORCH_ARG(std::optional<at::Tensor>, rows) = std::nullopt;
  /// (experts, out_features): added to the results of each expert.
  TORCH_ARG(std::optional<at::Tensor>, bias) = std::nullopt;
  /// The dtype to which the operands are rounded, and that of the result. Without it, that of x, which the
  /// weight and the bias must have, too.
  TORCH_ARG(std::optional<at::ScalarType>, dtype) = std::nullopt;
};

/// Multiplies rows of x (tokens, in_features) by the weights (experts, out_features, in_features) of their
/// experts. Returns (slots, out_features): row s is x[rows[s]] W_e^T + bias_e, where
/// offsets[e] <= s < offsets[e + 1]; rows of no expert are 0. offsets (experts + 1), int64: see moe_sort.
/// x, weight and bias have gradients. The result does not depend on the number of threads.
SHOESTRING_API at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight,
                                         const at::Tensor& offsets, const GroupedLinearOptions& options = {});

/// LoRA of the stacks of moe_experts: the weight of expert e is W_e + scaling * b_e a_e. Tensors of any
/// floating-point dtype, which all have gradients. A stack without a and b has none.
struct ExpertLora {
  /// (experts, rank, features) and (experts, 2 hidden, rank).
  TORCH_ARG(std::optional<at::Tensor>, gate_up_a) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, gate_up_b) = std::nullopt;
  /// (experts, rank, hidden) and (experts, features, rank). The rank may be another one.
  TORCH_ARG(std::optional<at::Tensor>, down_a) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, down_b) = std::nullopt;
  TORCH_ARG(double, scaling) = 1.0;
  /// The probability with which an element of the rows that a reads is dropped: of x, and of the gated
  /// features.
  TORCH_ARG(double, dropout) = 0.0;
  /// With dropout: one int64 on the device of x, which decides the masks.
  TORCH_ARG(std::optional<at::Tensor>, seed) = std::nullopt;
};

/// Options of moe_experts.
struct MoeExpertsOptions {
  /// (experts, 2 hidden): added to the products with gate_up.
  TORCH_ARG(std::optional<at::Tensor>, gate_up_bias) = std::nullopt;
  /// (experts, features): added to the products with down, before they are weighted.
  TORCH_ARG(std::optional<at::Tensor>, down_bias) = std::nullopt;
  /// The gate: "silu", "gelu", "gelu_tanh", each activation(g) * u, or "swigluoai", g * sigmoid(1.702 g) *
  /// (u + 1) of gpt-oss.
  TORCH_ARG(std::string, activation) = "silu";
  /// A number to which g is clamped from above, and u in absolute value.
  TORCH_ARG(std::optional<double>, limit) = std::nullopt;
  /// If true, g is at even and u at odd features of the products with gate_up, else g is their first half.
  TORCH_ARG(bool, interleaved) = false;
  /// If true, gate_up has shape (experts, features, 2 hidden) and down (experts, hidden, features).
  TORCH_ARG(bool, transposed) = false;
  /// The scales of a frozen quantised stack, whose codes are passed as gate_up or down: the results of
  /// quantize_4bit or quantize_int8 for the whole stack. The matrix of each expert must have whole blocks.
  /// Products on the CPU decode the codes while they read them. On CUDA, some experts are decoded at a time.
  TORCH_ARG(std::optional<at::Tensor>, gate_up_absmax) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, down_absmax) = std::nullopt;
  /// With double quantisation, the second result of quantize_absmax.
  TORCH_ARG(std::optional<at::Tensor>, gate_up_nested) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, down_nested) = std::nullopt;
  /// The format of both stacks. "int8" ignores block_size.
  TORCH_ARG(QuantizeOptions, quantize) = {};
  /// The hidden features; needed if gate_up is quantised.
  TORCH_ARG(std::optional<int64_t>, hidden_features) = std::nullopt;
  /// LoRA of the stacks, dense or quantised.
  TORCH_ARG(std::optional<ExpertLora>, lora) = std::nullopt;
  /// The dtype to which the operands are rounded, and that of the result. Without it, that of x, which the
  /// dense weights and the biases must have, too.
  TORCH_ARG(std::optional<at::ScalarType>, dtype) = std::nullopt;
};

/// Computes the MLPs of experts. For x (..., features), index and weight (..., top_k) as moe_route returns
/// them, gate_up (experts, 2 hidden, features) and down (experts, features, hidden), returns (..., features):
/// for each token the sum over its experts of weight * (a down_e^T + down_bias_e), where a is the gate of x
/// gate_up_e^T + gate_up_bias_e. An index of -1 is no expert. All tensors but the index and quantised stacks
/// have gradients. Backward keeps x and the products with gate_up. The result does not depend on the number
/// of threads.
SHOESTRING_API at::Tensor moe_experts(const at::Tensor& x, const at::Tensor& index, const at::Tensor& weight,
                                      const at::Tensor& gate_up, const at::Tensor& down,
                                      const MoeExpertsOptions& options = {});

}  // namespace shoestring
