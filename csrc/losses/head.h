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

/// The inputs of an output layer that can have a gradient. A Mask tells which of these gradients are
/// requested.
enum Input { kHidden, kWeight, kBias, kLoraHidden, kLoraB, kInputs };
using Mask = std::array<bool, kInputs>;
using Gradients = std::array<Tensor, kInputs>;  // one gradient per input; undefined if not requested

inline bool any(const Mask& mask) { return std::find(mask.begin(), mask.end(), true) != mask.end(); }
Mask mask_of(const c10::IValue& list);
c10::List<bool> list_of(const Mask& mask);

/// Returns the number of classes of a (vocab, features) weight. If `packed`, `weight` holds the packed codes
/// of a quantised weight, and the number follows from hidden's features.
c10::SymInt vocab_of(const Tensor& hidden, const Tensor& weight, bool packed);

/// The output layer of a model: its input, its weight and, for LoRA, the low-rank pair.
struct Head {
  Head() = default;
  /// Reads the arguments whose names are `prefix` + "hidden", "weight", "bias" and so on. Pass `vocab`, the
  /// number of classes, if another head determines it: a teacher must have as many classes as its student.
  Head(const BoxedArguments& arguments, const std::string& prefix = "",
       const std::optional<c10::SymInt>& vocab = std::nullopt);

  // hidden (..., features); weight (vocab, features), or packed codes of a quantised weight
  Tensor hidden, weight;
  OptionalTensor bias;            // shape (vocab)
  OptionalTensor absmax, nested;  // block scales of a quantised weight, and scales of these scales
  std::string quant_type;
  int64_t block_size = 0;
  OptionalTensor lora_hidden, lora_B;  // LoRA pair: shapes (..., rank) and (vocab, rank)
  std::string prefix;                  // prefix of the argument names, "" or "teacher_"
  c10::SymInt vocab;

  /// Returns the shape of hidden without its last dimension, the features.
  c10::SymIntArrayRef tokens() const { return hidden.sym_sizes().slice(0, hidden.dim() - 1); }
  /// check() raises if the shapes, dtypes or devices of the tensors do not match each other. With `wide`, an
  /// fp32 weight matches 16-bit hidden states on the CPU. check_mask() raises if `mask` requests the gradient
  /// of a quantised weight.
  void check(const char* op, bool wide = false) const;
  void check_mask(const char* op, const Mask& mask) const;
  /// Appends the head's tensors and options to the arguments of _linear_cross_entropy_rows or
  /// _linear_distillation_rows. hidden and lora_hidden are reshaped to (tokens, features) and (tokens, rank).
  void append_to(NamedArguments& arguments) const;
  /// Returns the weight, dense or quantised, as a BaseWeight, which provides it in the dtype `product` for
  /// matrix products.
  quantization::BaseWeight base(Backend backend, const char* op, at::ScalarType product) const;
  /// Returns the inputs in the order of the enum Input. A gradient has the shape and the dtype of its input.
  std::array<OptionalTensor, kInputs> inputs() const { return {hidden, weight, bias, lora_hidden, lora_B}; }
};

/// Returns the value of the argument `name`, which must be one of `arguments`.
const c10::IValue& value_of(const NamedArguments& arguments, std::string_view name);

void check_target(const char* op, const Head& head, const Tensor& target);
/// Checks that the upstream gradient `factor` has the shape () or hidden's shape without the features.
void check_factor(const char* op, const char* name, const Head& head, const OptionalTensor& factor);
void check_reduction(const char* op, const std::string& reduction);
void check_workspace(const char* op, int64_t workspace_mb);
constexpr int64_t kDefaultWorkspaceMb = 64;  // default value of the option workspace_mb on the CPU, in MiB

/// Reshapes t, which has one value per token, to one dimension. A scalar for all tokens, or an undefined
/// tensor, is returned unchanged.
Tensor flat(const Head& head, const Tensor& t);

/// Returns the indices in [0, tokens) of the tokens that are not ignored. Without a target no token is
/// ignored; otherwise a token is ignored if its target is ignore_index. If `vocab` is given, raises for any
/// other target outside [0, vocab).
std::vector<int64_t> rows_that_count(const char* op, int64_t tokens, const OptionalTensor& target,
                                     int64_t ignore_index, std::optional<int64_t> vocab = std::nullopt);

}  // namespace shoestring::losses
