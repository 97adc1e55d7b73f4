#pragma once

// What the CPU and the CUDA side of linear_distillation share, and what autograd needs of it.

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string>

#include "kernels/linear_distillation.h"
#include "ops/call.h"

namespace shoestring::distillation {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kOp = "linear_distillation";

/// What may have a gradient, and which are wanted. The teacher has none.
enum Input { kHidden, kWeight, kBias, kInputs };
using Mask = std::array<bool, kInputs>;

struct Result {
  Tensor loss;                            // (tokens), compute type
  std::array<Tensor, kInputs> gradients;  // undefined where not wanted
};

/// The arguments of linear_distillation_rows, checked.
struct Problem {
  explicit Problem(const BoxedArguments& arguments);

  bool wants_gradient() const { return mask[kHidden] || mask[kWeight] || mask[kBias]; }

  Tensor hidden, weight;                  // (tokens, features), (vocab, features)
  Tensor teacher_hidden, teacher_weight;  // (tokens, teacher features), (vocab, teacher features)
  OptionalTensor bias, teacher_bias;      // (vocab)
  OptionalTensor target;                  // (tokens)
  OptionalTensor grad_loss;               // () or (tokens)
  int64_t ignore_index;
  kernels::Divergence divergence;
  double beta, temperature;
  bool averaged;
  int64_t workspace_mb;
  Mask mask;
};

/// Registers a device's linear_distillation_rows.
using Run = Result (*)(const Problem&);
void push(torch::jit::Stack* stack, const c10::OperatorHandle& op, const Result& result,
          const Tensor& hidden);
template <Run run>
void boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Problem problem(BoxedArguments(op, *stack));
  push(stack, op, run(problem), problem.hidden);
}

/// Those that linear_distillation_rows has as well.
constexpr const char* kOptions[] = {"ignore_index", "divergence", "beta", "temperature", "workspace_mb"};

/// A call of linear_distillation.
struct Call {
  Call() = default;
  explicit Call(const BoxedArguments& arguments);

  Tensor hidden, weight, teacher_hidden, teacher_weight;  // (..., features)
  OptionalTensor bias, teacher_bias, target;
  std::string reduction;
  NamedArguments options;  // kOptions

  bool scalar() const { return reduction != "none"; }
  /// hidden's shape without features.
  c10::SymIntArrayRef shape() const { return hidden.sym_sizes().slice(0, hidden.dim() - 1); }
  /// How many tokens count: (), fp64.
  Tensor count() const;
  /// The result, of the losses of tokens.
  Tensor reduce(const Tensor& loss) const;
};

/// linear_distillation_rows through the dispatcher, with the results in the shapes of the call. `upstream`:
/// of the tokens' losses, in their shape or (); undefined without gradients.
Result rows(const Call& call, const Tensor& upstream, const Mask& mask);

}  // namespace shoestring::distillation
