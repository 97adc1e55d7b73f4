#pragma once

#include <optional>
#include <vector>

#include <shoestring/adapters/adaptable_linear.h>

namespace shoestring::nn {

/// Low-rank product that a layer adds to its base weight: scaling * lora_B lora_A.
struct Part {
  at::Tensor lora_A, lora_B;  // lora_A: (rank, in_features); lora_B: (out_features, rank)
  double scaling;
  // Mask (batch size, 1): 1 for the rows of the batch that use this product, else 0. Undefined if all rows
  // use it.
  at::Tensor uses;
};

/// Returns the low-rank product that the adapter's initialisation subtracted from the base weight.
Part taken_part(const AdapterImpl& adapter);

/// Sets lora_A, lora_B and scaling of `layer` so that their product is the sum of the products in `parts`.
/// With several parts, lora_B includes their scaling.
void concatenate(const std::vector<Part>& parts, LoraWeight& layer);

/// Returns a mask (tokens, sum of the ranks of `parts`). Each column belongs to one of the low-rank products
/// in `parts`. The mask is 1 if the token's row of the batch uses that product, else 0.
at::Tensor row_scale(const std::vector<Part>& parts, const at::Tensor& x);

/// Returns `dense` plus the low-rank products in `parts`, as a new tensor with the dtype of `dense`.
at::Tensor low_rank_sum(const at::Tensor& dense, const std::vector<Part>& parts);

/// Draws the initial tensors of a LoRA adapter of a linear layer or a convolution. PEFT draws random values
/// for two whole layers before it initialises lora_A. This function draws and discards as many values, so
/// that equal seeds give the same lora_A as in PEFT. down, up: shapes of lora_A and lora_B. through: dtype of
/// a dense base weight, to which lora_A is rounded as in PEFT.
AdapterImpl::Tensors draw(at::IntArrayRef down, at::IntArrayRef up, const LoraOptions& options,
                          std::optional<at::ScalarType> through);

/// Returns a quantised layer of the given sizes and quantisation options. The caller must still set its
/// weight.
QuantizedLinear without_weight(const AdaptableLinearOptions& options, const QuantizeOptions& quantize,
                               bool double_quant);

/// Returns two sums of squares over the elements of a merged weight: of its rounding error (after - exact),
/// and of the change that the adapters made (exact - before).
std::array<double, 2> merge_error(const at::Tensor& before, const at::Tensor& exact, const at::Tensor& after);

/// Returns the arguments for dropout with a newly drawn seed. Without dropout (probability 0), returns
/// default arguments.
LoraInput input_with(double dropout, const at::Tensor& x);

/// Returns the tensor as an optional one, which is empty if the tensor is undefined.
inline std::optional<at::Tensor> optional(const at::Tensor& t) {
  return t.defined() ? std::optional<at::Tensor>(t) : std::nullopt;
}

/// Adds two tensors, of which one or both may be undefined.
inline at::Tensor add_defined(const at::Tensor& first, const at::Tensor& second) {
  return !first.defined() ? second : !second.defined() ? first : first + second;
}

}  // namespace shoestring::nn
