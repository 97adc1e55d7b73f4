#pragma once

// What the losses of a linear layer over the vocabulary, linear_cross_entropy and linear_distillation, share.

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "core/call.h"
#include "quantization/base_weight.h"

namespace shoestring::losses {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

/// What may have a gradient, and which are wanted.
enum Input { kHidden, kWeight, kBias, kLow, kUp, kInputs };
using Mask = std::array<bool, kInputs>;
using Gradients = std::array<Tensor, kInputs>;  // undefined where not wanted

inline bool any(const Mask& mask) { return std::find(mask.begin(), mask.end(), true) != mask.end(); }
Mask mask_of(const c10::IValue& list);
c10::List<bool> list_of(const Mask& mask);

/// Of a (vocab, features) weight, or the bytes of a packed one.
c10::SymInt vocab_of(const Tensor& hidden, const Tensor& weight, bool packed);

/// The layer, and what it reads.
struct Head {
  Head() = default;
  /// By the arguments of these names, each after `prefix`. vocab: where it is another head's.
  Head(const BoxedArguments& arguments, const std::string& prefix = "",
       const std::optional<c10::SymInt>& vocab = std::nullopt);

  Tensor hidden, weight;          // (..., features), (vocab, features) or packed
  OptionalTensor bias;            // (vocab)
  OptionalTensor absmax, nested;  // of a quantised weight
  std::string quant_type;
  int64_t block_size = 0;
  OptionalTensor low, up;  // (..., rank), (vocab, rank)
  std::string prefix;      // of the arguments' names
  c10::SymInt vocab;

  /// hidden's shape without features.
  c10::SymIntArrayRef tokens() const { return hidden.sym_sizes().slice(0, hidden.dim() - 1); }
  /// Refuses parts that do not fit each other, and a gradient that there is not.
  void check(const char* op) const;
  void check_mask(const char* op, const Mask& mask) const;
  /// As arguments: hidden and low with the tokens in one dimension.
  void append_to(NamedArguments& arguments) const;
  /// For products in `product`.
  quantization::BaseWeight base(Backend backend, const char* op, at::ScalarType product) const;
  /// hidden, weight, bias, low and up: what the gradients are like.
  std::array<OptionalTensor, kInputs> inputs() const { return {hidden, weight, bias, low, up}; }
};

/// The value of that name, which is there.
const c10::IValue& value_of(const NamedArguments& arguments, std::string_view name);

void check_target(const char* op, const Head& head, const Tensor& target);
/// Of the gradient: () or (tokens).
void check_factor(const char* op, const char* name, const Head& head, const OptionalTensor& factor);
void check_reduction(const char* op, const std::string& reduction);
void check_workspace(const char* op, int64_t workspace_mb);
constexpr int64_t kDefaultWorkspaceMb = 64;  // on the CPU

/// A result for each token, or one number for all, with the tokens in one dimension; not defined where t is
/// not.
Tensor flat(const Head& head, const Tensor& t);

/// The positions, among `tokens`, of those that count: all where there is no target, else those whose target
/// (tokens) is not ignore_index. With `vocab`, a target outside [0, vocab) is an error.
std::vector<int64_t> rows_that_count(const char* op, int64_t tokens, const OptionalTensor& target,
                                     int64_t ignore_index, std::optional<int64_t> vocab = std::nullopt);

}  // namespace shoestring::losses
