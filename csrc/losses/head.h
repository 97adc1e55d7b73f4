#pragma once

// Shared parts of the losses that apply a linear layer over the vocabulary: linear_cross_entropy and
// linear_distillation.

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "core/tensors.h"
#include "quantization/base_weight.h"

namespace shoestring::losses {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

/// The inputs of an output layer that can have a gradient. A Mask tells which of these gradients are
/// requested.
enum Input { kHidden, kWeight, kBias, kLoraHidden, kLoraB, kInputs };
using Mask = std::array<bool, kInputs>;
using Gradients = std::array<Tensor, kInputs>;  // one gradient per input; undefined if not requested

using Inputs = std::array<OptionalTensor, kInputs>;

/// Returns the inputs of the layer of a problem, in the order of the enum Input.
template <class Problem>
Inputs inputs_of(const Problem& p) {
  return {p.input, p.weight, p.bias, p.options.lora_hidden(), p.options.lora_B()};
}
/// Returns a mask of the inputs that require a gradient.
inline Mask require_grad(const Inputs& inputs) {
  Mask mask{};
  for (int i = 0; i < kInputs; ++i) mask[i] = inputs[i] && inputs[i]->requires_grad();
  return mask;
}
inline bool any(const Mask& mask) { return std::find(mask.begin(), mask.end(), true) != mask.end(); }

/// Lists the options of a layer over the vocabulary, as arguments of an operator (core/arguments.h).
template <class Options, class Visitor>
void visit_head(Options& o, Visitor& visit) {
  visit("absmax", o.absmax());
  visit("nested", o.nested());
  visit("quant_type", o.quant_type());
  visit("block_size", o.block_size());
  visit("lora_hidden", o.lora_hidden());
  visit("lora_B", o.lora_B());
}

/// Returns the number of classes of a (vocab, features) weight. If `packed`, `weight` holds the packed codes
/// of a quantised weight, and the number follows from hidden's features.
c10::SymInt vocab_of(const Tensor& hidden, const Tensor& weight, bool packed);

/// The output layer of a model: its input, its weight and, for LoRA, the low-rank pair.
struct Head {
  Head() = default;
  /// The layer of the problem `p`.
  template <class Problem>
  explicit Head(const Problem& p)
      : hidden(p.input), weight(p.weight), bias(p.bias), absmax(p.options.absmax()),
        nested(p.options.nested()), quant_type(p.options.quant_type()), block_size(p.options.block_size()),
        lora_hidden(p.options.lora_hidden()), lora_B(p.options.lora_B()),
        vocab(vocab_of(hidden, weight, absmax.has_value())) {}

  // hidden (..., features); weight (vocab, features), or packed codes of a quantised weight
  Tensor hidden, weight;
  OptionalTensor bias;            // shape (vocab)
  OptionalTensor absmax, nested;  // block scales of a quantised weight, and scales of these scales
  std::string quant_type;
  int64_t block_size = 0;
  OptionalTensor lora_hidden, lora_B;  // LoRA pair: shapes (..., rank) and (vocab, rank)
  std::string prefix;                  // prefix of the argument names, "" or "teacher_"
  // Number of classes. A teacher must have as many classes as its student, which determines the number.
  c10::SymInt vocab;

  /// Returns the shape of hidden without its last dimension, the features.
  c10::SymIntArrayRef tokens() const { return hidden.sym_sizes().slice(0, hidden.dim() - 1); }
  /// check() raises if the shapes, dtypes or devices of the tensors do not match each other. With `wide`, an
  /// fp32 weight matches 16-bit hidden states on the CPU. check_mask() raises if `mask` requests the gradient
  /// of a quantised weight.
  void check(const char* op, bool wide = false) const;
  void check_mask(const char* op, const Mask& mask) const;
  /// Returns the weight, dense or quantised, as a BaseWeight, which provides it in the dtype `product` for
  /// matrix products.
  quantization::BaseWeight base(Backend backend, const char* op, at::ScalarType product) const;
};

void check_target(const char* op, const Head& head, const Tensor& target);
/// Checks that the upstream gradient `factor` has the shape () or hidden's shape without the features.
void check_factor(const char* op, const char* name, const Head& head, const OptionalTensor& factor);
void check_reduction(const char* op, const std::string& reduction);
void check_workspace(const char* op, int64_t workspace_mb);
constexpr int64_t kDefaultWorkspaceMb = 64;  // default value of the option workspace_mb on the CPU, in MiB

/// Reshapes hidden or lora_hidden, (..., features), to (tokens, features).
Tensor flat_rows(const Tensor& t);
OptionalTensor flat_rows(const OptionalTensor& t);
/// Reshapes t, which has one value for each token of `hidden`, to one dimension. A scalar for all tokens, or
/// an undefined tensor, is returned unchanged.
Tensor flat(const Tensor& hidden, const Tensor& t);

/// The gradients of a head as results of an operator, in which those that are not requested are empty.
template <class Self, class Visitor>
void visit_gradients(Self& gradients, Visitor& visit) {
  visit("grad_hidden", gradients[kHidden]);
  visit("grad_weight", gradients[kWeight]);
  visit("grad_bias", gradients[kBias]);
  visit("grad_lora_hidden", gradients[kLoraHidden]);
  visit("grad_lora_B", gradients[kLoraB]);
}
/// Returns uninitialised gradients, which have the shapes and dtypes of their inputs.
Gradients empty_gradients(const Inputs& inputs, const Mask& mask);
/// Keeps the gradients in `mask` only, and gives those of hidden and lora_hidden the shapes of these inputs.
void view_gradients(Gradients& gradients, const Mask& mask, const Tensor& hidden,
                    const OptionalTensor& lora_hidden);

/// Returns the indices in [0, tokens) of the tokens that are not ignored. Without a target no token is
/// ignored; otherwise a token is ignored if its target is ignore_index. If `vocab` is given, raises for any
/// other target outside [0, vocab). `name` is the argument that the error names.
std::vector<int64_t> rows_that_count(const char* op, int64_t tokens, const OptionalTensor& target,
                                     int64_t ignore_index, std::optional<int64_t> vocab = std::nullopt,
                                     const char* name = "target");

}  // namespace shoestring::losses
