#pragma once

// What the CPU and the CUDA side of linear_cross_entropy share, and what autograd needs of it.

#include <array>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include "ops/head.h"

namespace shoestring::cross_entropy {

constexpr const char* kOp = "linear_cross_entropy";

using namespace head;

/// The arguments of linear_cross_entropy_rows, checked but for what the targets hold.
struct Problem : Head {
  explicit Problem(const BoxedArguments& arguments);

  Tensor target;                // (tokens)
  OptionalTensor class_weights;
  OptionalTensor weight_grad;                        // what the weight's gradient is added to
  OptionalTensor grad_loss, grad_lse, grad_entropy;  // () or (tokens)
  int64_t ignore_index;
  double label_smoothing, softcap, logit_scale, z_loss, filter_eps;
  bool averaged, stats;
  int64_t workspace_mb;
  Mask mask;
};

/// A check that a call shares with its rows.
void check_weights(const char* name, const OptionalTensor& weights, c10::SymIntArrayRef shape, const Tensor& hidden);

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
constexpr const char* kOptions[] = {"ignore_index", "label_smoothing", "softcap",     "logit_scale",
                                    "z_loss",       "filter_eps",      "workspace_mb"};

/// A call of linear_cross_entropy, with stats or without.
struct Call : Head {
  Call() = default;
  Call(const BoxedArguments& arguments, bool stats);

  Tensor target;  // (...): shifted
  OptionalTensor class_weights, token_weights, weight_grad;
  std::string reduction;
  double hard_fraction = 1;
  std::optional<double> grad_scale;
  NamedArguments options;  // kOptions
  bool stats = false;

  int64_t ignore_index() const { return head::value_of(options, "ignore_index").toInt(); }
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
