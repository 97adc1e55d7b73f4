#pragma once

// What the CPU and the CUDA side of linear_cross_entropy share, and what autograd needs of it.

#include <algorithm>
#include <array>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include "ops/call.h"

namespace shoestring::cross_entropy {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kOp = "linear_cross_entropy";

/// What may have a gradient, and which are wanted.
enum Input { kHidden, kWeight, kBias, kLow, kUp, kInputs };
using Mask = std::array<bool, kInputs>;
using Gradients = std::array<Tensor, kInputs>;  // undefined where not wanted

inline bool any(const Mask& mask) { return std::find(mask.begin(), mask.end(), true) != mask.end(); }

/// The arguments of linear_cross_entropy_rows, checked but for what the targets hold.
struct Problem {
  explicit Problem(const BoxedArguments& arguments);

  Tensor hidden, weight, target;  // (tokens, features), (vocab, features) or packed, (tokens)
  OptionalTensor bias, class_weights;
  OptionalTensor absmax, nested;  // of a quantised weight
  std::string quant_type;
  int64_t block_size;
  OptionalTensor low, up;
  OptionalTensor weight_grad;                        // what the weight's gradient is added to
  OptionalTensor grad_loss, grad_lse, grad_entropy;  // () or (tokens)
  int64_t ignore_index;
  double label_smoothing, softcap, logit_scale, z_loss, filter_eps;
  bool averaged, stats;
  int64_t workspace_mb;
  Mask mask;
  c10::SymInt vocab;
};

// The checks that a call shares with its rows.
void check_tokens(const Tensor& hidden, const Tensor& target);
void check_weights(const char* name, const OptionalTensor& weights, c10::SymIntArrayRef shape, const Tensor& hidden);
c10::SymInt vocab_of(const Tensor& hidden, const Tensor& weight, bool packed);

struct Result {
  Tensor loss, lse;        // (tokens), compute type
  Tensor entropy, argmax;  // undefined where not wanted
  Gradients gradients;
};

/// Registers a device's linear_cross_entropy_rows.
using Run = Result (*)(const Problem&);
void push(torch::jit::Stack* stack, const c10::OperatorHandle& op, const Result& result, const Tensor& hidden);
template <Run run>
void boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Problem problem(BoxedArguments(op, *stack));
  push(stack, op, run(problem), problem.hidden);
}

/// Those that linear_cross_entropy_rows has as well.
constexpr const char* kOptions[] = {"ignore_index", "label_smoothing", "softcap",    "logit_scale", "z_loss",
                                    "filter_eps",   "quant_type",      "block_size", "workspace_mb"};

/// A call of linear_cross_entropy, with stats or without.
struct Call {
  Call() = default;
  Call(const BoxedArguments& arguments, bool stats);

  Tensor hidden, weight, target;  // (..., features), (vocab, features) or packed, (...): shifted
  OptionalTensor bias, low, up;
  OptionalTensor class_weights, token_weights, absmax, nested, weight_grad;
  std::string reduction;
  double hard_fraction = 1;
  std::optional<double> grad_scale;
  NamedArguments options;  // kOptions
  bool stats = false;

  c10::SymInt vocab() const;
};

/// The call on the tokens of the largest losses, by a pass of its own; the others are ignored. Nothing else, where
/// hard_fraction is 1.
void keep_hardest(Call& call);

/// How the losses of tokens become a result: sum(weights loss) / total. Undefined: weights of one, and no total.
struct Reduction {
  explicit Reduction(const Call& call);

  Tensor weights;  // (...)
  Tensor total;    // (), fp64
  Tensor apply(const Tensor& loss) const;
  /// What a scalar result's gradient by the tokens' losses is: () or (...), of `dtype`.
  Tensor factor(at::ScalarType dtype) const;
  bool scalar;
  bool copies;  // the losses of tokens are a result besides
};

/// linear_cross_entropy_rows through the dispatcher, with the results in the shapes of the call. `upstream`, of loss, lse
/// and entropy, in target's shape or (); undefined tensors for those that there are none of.
Result rows(const Call& call, const std::array<Tensor, 3>& upstream, const Mask& mask);

}  // namespace shoestring::cross_entropy
