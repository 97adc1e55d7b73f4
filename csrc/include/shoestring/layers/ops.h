#pragma once

// The operators of layers: norms, rotary embeddings, gated activations, dropout.

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <shoestring/core/export.h>

namespace shoestring {

/// Drops each element of x with probability p and divides the others by 1 - p. The mask depends only on
/// `seed` (one int64 on x's device) and the element's index, so backward generates the mask again.
/// Differentiable.
SHOESTRING_API at::Tensor seeded_dropout(const at::Tensor& x, const at::Tensor& seed, double p);

/// Computes silu(gate) * up in fp32 and rounds once. Saves only gate and up for backward.
SHOESTRING_API at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

/// Computes gelu(gate) * up in fp32 and rounds once. `approximate` is "none" (the exact GELU) or "tanh".
/// Saves only gate and up for backward.
SHOESTRING_API at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up,
                                const std::string& approximate = "none");

/// Computes gelu(x) in fp32 and rounds once. `approximate` is "none" (the exact GELU) or "tanh". Saves only x
/// for backward.
SHOESTRING_API at::Tensor gelu(const at::Tensor& x, const std::string& approximate = "none");

struct RMSNormOptions {
  explicit RMSNormOptions(double eps) : eps_(eps) {}
  /// A constant that is added to the mean of squares.
  TORCH_ARG(double, eps);
  /// A constant that is added to the weight. Gemma uses 1.
  TORCH_ARG(double, offset) = 0.0;
  /// Selects which values are rounded to 16 bits before the multiplication by the weight, if the input has 16
  /// bits. With "llama", the normalised row is rounded. With "gemma", no value is rounded. With "none", the
  /// reciprocal root, the normalised row and the weight are rounded. The gradients are those of the function
  /// without rounding.
  TORCH_ARG(std::string, upcast) = "llama";
  /// The dtype of the result: bf16 or fp16 for rows of fp32. Linear layers under autocast take such results
  /// without another conversion. x of that dtype can be added to a residual of fp32.
  TORCH_ARG(std::optional<at::ScalarType>, out_dtype) = std::nullopt;
};

/// Computes x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension, with fp32 sums. Returns
/// x's dtype or options.out_dtype. weight (features), any floating-point dtype. Saves x and one number per
/// row for backward.
SHOESTRING_API at::Tensor rms_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight,
                                   const RMSNormOptions& options);

/// Returns rms_norm(x + residual) and x + residual, computed in one pass.
SHOESTRING_API std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x,
                                                               const at::Tensor& residual,
                                                               const std::optional<at::Tensor>& weight,
                                                               const RMSNormOptions& options);

/// Computes (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, in fp32. Returns
/// x's dtype or out_dtype, which is bf16 or fp16 for fp32 x. weight and bias (features), any floating-point
/// dtype. Saves x and two numbers per row for backward.
SHOESTRING_API at::Tensor layer_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight,
                                     const std::optional<at::Tensor>& bias, double eps,
                                     std::optional<at::ScalarType> out_dtype = std::nullopt);

/// Returns layer_norm(x + residual) and x + residual, computed in one pass. Both have the dtype of the
/// residual, which may be fp32 while x is 16-bit; with out_dtype, the norm has that dtype.
SHOESTRING_API std::tuple<at::Tensor, at::Tensor> add_layer_norm(
    const at::Tensor& x, const at::Tensor& residual, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, double eps,
    std::optional<at::ScalarType> out_dtype = std::nullopt);

struct RopeOptions {
  /// The number of elements of each head that are rotated, counted from the first element. The default is all
  /// elements.
  TORCH_ARG(std::optional<int64_t>, rotary_dim) = std::nullopt;
  /// If true, a pair of elements that is rotated together consists of two neighbouring elements. Otherwise
  /// the elements of a pair are rotary_dim / 2 apart.
  TORCH_ARG(bool, interleaved) = false;
  /// (tokens) or (1 or batch, tokens), int64: the row of cos and sin (positions, width) for each token.
  TORCH_ARG(std::optional<at::Tensor>, position_ids) = std::nullopt;
  /// (head_dim): weights of an RMSNorm that is applied to each head of q and k before the rotation. The
  /// normalised head is multiplied by offset + weight. Give both weights or neither.
  TORCH_ARG(std::optional<at::Tensor>, q_weight) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, k_weight) = std::nullopt;
  TORCH_ARG(double, eps) = 1e-6;
  TORCH_ARG(double, offset) = 0.0;
};

/// Applies rotary position embedding to q and k, (batch, heads, tokens, head_dim) or (tokens, heads,
/// head_dim) with any strides. Computes in fp32 and rounds once. cos and sin are (tokens, width) or (1 or
/// batch, tokens, width); with position_ids they are (positions, width). width is rotary_dim / 2, or
/// rotary_dim if each angle is stored twice. q, k, q_weight and k_weight receive gradients. Without q_weight
/// and k_weight, q and k are not saved for backward.
SHOESTRING_API std::tuple<at::Tensor, at::Tensor> rope(const at::Tensor& q, const at::Tensor& k,
                                                       const at::Tensor& cos, const at::Tensor& sin,
                                                       const RopeOptions& options = {});

}  // namespace shoestring
