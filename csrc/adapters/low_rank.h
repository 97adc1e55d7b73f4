#pragma once

#include <optional>
#include <vector>

#include <shoestring/nn/linear.h>

namespace shoestring::nn {

/// One adapter's low-rank product: scaling * lora_B lora_A.
struct Part {
  at::Tensor lora_A, lora_B;  // (rank, in_features), (out_features, rank)
  double scaling;
  at::Tensor uses;  // (rows, 1): which rows of the batch have it; undefined where all do
};

/// What an adapter that changed the base took out of it.
Part taken_part(const AdapterImpl& adapter);

/// All parts as one adapter of a layer; the scaling is in lora_B where there are several.
void concatenate(const std::vector<Part>& parts, LoraWeight& layer);

/// (tokens, rank): 1 where a token's row uses the adapter that the rank belongs to.
at::Tensor row_scale(const std::vector<Part>& parts, const at::Tensor& x);

/// dense + scaling lora_B lora_A of every part, in dense's dtype; a new tensor.
at::Tensor low_rank_sum(const at::Tensor& dense, const std::vector<Part>& parts);

/// First values of a linear layer's adapter, rounded to a dense base's dtype as PEFT's are. PEFT builds two
/// layers, which draw for themselves, before it initialises: ours draw along, so that a seed gives the same
/// start.
AdapterImpl::Tensors draw(int64_t in_features, int64_t out_features, const AdapterOptions& options,
                          std::optional<at::ScalarType> through);

/// A layer in this form whose weight is still to come: given a 1 x 1 form first, no random one of the full
/// size is drawn.
QuantizedLinear without_weight(const LinearOptions& options, const QuantizeOptions& quantize, bool nested);

/// The squared norms of what rounding lost and of the change, of a weight before and after a merge.
std::array<double, 2> merge_error(const at::Tensor& before, const at::Tensor& exact, const at::Tensor& after);

/// Dropout of this probability with a new seed; none for 0.
LoraInput input_with(double dropout, const at::Tensor& x);

inline std::optional<at::Tensor> optional(const at::Tensor& t) {
  return t.defined() ? std::optional<at::Tensor>(t) : std::nullopt;
}

/// The sum of what is there.
inline at::Tensor add_defined(const at::Tensor& first, const at::Tensor& second) {
  return !first.defined() ? second : !second.defined() ? first : first + second;
}

}  // namespace shoestring::nn
