#pragma once

// Shared parts of the losses that apply a linear layer over the vocabulary: linear_cross_entropy and
// linear_distillation.

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

/// The inputs that can have a gradient, and a mask of the requested gradients.
enum Input { kHidden, kWeight, kBias, kLow, kUp, kInputs };
using Mask = std::array<bool, kInputs>;
using Gradients = std::array<Tensor, kInputs>;  // one per input; undefined if not requested

inline bool any(const Mask& mask) { return std::find(mask.begin(), mask.end(), true) != mask.end(); }
Mask mask_of(const c10::IValue& list);
c10::List<bool> list_of(const Mask& mask);

/// Returns the vocabulary size of a (vocab, features) weight, or of the packed codes of a quantised weight.
c10::SymInt vocab_of(const Tensor& hidden, const Tensor& weight, bool packed);

/// The output layer of a model: its input, its weight and, for LoRA, the low-rank pair.
struct Head {
  Head() = default;
  /// Reads the arguments of these names, each with `prefix` in front. `vocab` is given if another head
  /// determines it.
  Head(const BoxedArguments& arguments, const std::string& prefix = "",
       const std::optional<c10::SymInt>& vocab = std::nullopt);

  Tensor hidden, weight;          // shapes (..., features); (vocab, features), or packed codes
  OptionalTensor bias;            // shape (vocab)
  OptionalTensor absmax, nested;  // scales of a quantised weight
  std::string quant_type;
  int64_t block_size = 0;
  OptionalTensor low, up;  // LoRA pair: shapes (..., rank), (vocab, rank)
  std::string prefix;      // prefix of the arguments' names
  c10::SymInt vocab;

  /// Returns hidden's shape without the features.
  c10::SymIntArrayRef tokens() const { return hidden.sym_sizes().slice(0, hidden.dim() - 1); }
  /// check() raises if tensors do not fit each other; check_mask() if a requested gradient does not exist.
  void check(const char* op) const;
  void check_mask(const char* op, const Mask& mask) const;
  /// Appends the head's arguments for a `*_rows` operator: hidden and low get a single dimension of tokens.
  void append_to(NamedArguments& arguments) const;
  /// Returns the weight for matrix products of dtype `product`.
  quantization::BaseWeight base(Backend backend, const char* op, at::ScalarType product) const;
  /// Returns hidden, weight, bias, low and up, which have the shapes and dtypes of their gradients.
  std::array<OptionalTensor, kInputs> inputs() const { return {hidden, weight, bias, low, up}; }
};

/// Returns the value of an argument that must be in the list.
const c10::IValue& value_of(const NamedArguments& arguments, std::string_view name);

void check_target(const char* op, const Head& head, const Tensor& target);
/// Checks a factor of the gradient: () or (tokens).
void check_factor(const char* op, const char* name, const Head& head, const OptionalTensor& factor);
void check_reduction(const char* op, const std::string& reduction);
void check_workspace(const char* op, int64_t workspace_mb);
constexpr int64_t kDefaultWorkspaceMb = 64;  // default of workspace_mb on the CPU

/// Reshapes a result per token to one dimension of tokens. A scalar for all tokens, or an undefined tensor,
/// is returned unchanged.
Tensor flat(const Head& head, const Tensor& t);

/// Returns the indices, among `tokens`, of the tokens that are not ignored. Without a target these are all
/// tokens; otherwise those whose target (tokens) is not ignore_index. If `vocab` is given, raises for a
/// target outside [0, vocab).
std::vector<int64_t> rows_that_count(const char* op, int64_t tokens, const OptionalTensor& target,
                                     int64_t ignore_index, std::optional<int64_t> vocab = std::nullopt);

}  // namespace shoestring::losses
