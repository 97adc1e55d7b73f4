#pragma once

#include <optional>
#include <vector>

#include <shoestring/nn/linear.h>

namespace shoestring::nn {

/// The low-rank product of one adapter: scaling * lora_B lora_A.
struct Part {
  at::Tensor lora_A, lora_B;  // shapes: (rank, in_features) and (out_features, rank)
  double scaling;
  at::Tensor uses;  // (rows, 1): 1 for rows of the batch that use the adapter; undefined: all do
};

/// Returns the product that the adapter's initialisation subtracted from the base.
Part taken_part(const AdapterImpl& adapter);

/// Stores all parts as one adapter in `layer`. With several parts, lora_B includes their scaling.
void concatenate(const std::vector<Part>& parts, LoraWeight& layer);

/// Returns (tokens, rank): 1 if the token's row uses the adapter to which this column of the rank belongs,
/// else 0.
at::Tensor row_scale(const std::vector<Part>& parts, const at::Tensor& x);

/// Returns dense + the sum of scaling * lora_B lora_A over all parts, as a new tensor in dense's dtype.
at::Tensor low_rank_sum(const at::Tensor& dense, const std::vector<Part>& parts);

/// Draws the initial values of a linear layer's adapter. Like PEFT, rounds lora_A to the dtype of a dense
/// base. PEFT constructs two layers, which draw random values, before it initialises them. This function
/// draws the same numbers, so that a seed gives the same initial values as PEFT.
AdapterImpl::Tensors draw(int64_t in_features, int64_t out_features, const AdapterOptions& options,
                          std::optional<at::ScalarType> through);

/// Returns a quantised layer with these options whose weight is not set yet.
QuantizedLinear without_weight(const LinearOptions& options, const QuantizeOptions& quantize, bool nested);

/// Returns two squared norms for a merge: of the rounding error (after - exact) and of the change (exact -
/// before).
std::array<double, 2> merge_error(const at::Tensor& before, const at::Tensor& exact, const at::Tensor& after);

/// Returns dropout of this probability with a new seed, or no dropout for 0.
LoraInput input_with(double dropout, const at::Tensor& x);

inline std::optional<at::Tensor> optional(const at::Tensor& t) {
  return t.defined() ? std::optional<at::Tensor>(t) : std::nullopt;
}

/// Adds two tensors, of which one or both may be undefined.
inline at::Tensor add_defined(const at::Tensor& first, const at::Tensor& second) {
  return !first.defined() ? second : !second.defined() ? first : first + second;
}

}  // namespace shoestring::nn
