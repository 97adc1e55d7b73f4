#pragma once

// Shared declarations of the CPU, CUDA and autograd implementations of linear_distillation.

#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include "losses/head.h"
#include "losses/linear_distillation_table.h"

namespace shoestring::losses {

constexpr const char* kDistillationOp = "linear_distillation";

struct DistillationResult {
  Tensor loss;  // loss of each token, shape (tokens), compute dtype
  Gradients gradients;
};

/// The checked arguments of linear_distillation_rows: the student's head (the base class) and the teacher's.
struct DistillationProblem : Head {
  explicit DistillationProblem(const BoxedArguments& arguments);

  bool wants_gradient() const { return any(mask); }

  Head teacher;
  OptionalTensor target;     // target classes, shape (tokens)
  OptionalTensor grad_loss;  // upstream gradient of the loss, shape () or (tokens)
  int64_t ignore_index;
  kernels::Divergence divergence;
  double beta, temperature;
  bool averaged;
  int64_t workspace_mb;
  Mask mask;
};

/// Implement a device's linear_distillation_rows as a boxed kernel.
using DistillationRun = DistillationResult (*)(const DistillationProblem&);
void push_distillation_rows(torch::jit::Stack* stack, const c10::OperatorHandle& op,
                            const DistillationResult& result, const Tensor& hidden);
template <DistillationRun run>
void boxed_distillation_rows(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const DistillationProblem problem(BoxedArguments(op, *stack));
  push_distillation_rows(stack, op, run(problem), problem.hidden);
}

/// The options that linear_distillation_rows has as well.
constexpr const char* kDistillationOptions[] = {"ignore_index", "divergence", "beta", "temperature",
                                                "workspace_mb"};

/// The arguments of one call of linear_distillation.
struct DistillationCall : Head {
  DistillationCall() = default;
  explicit DistillationCall(const BoxedArguments& arguments);

  Head teacher;
  OptionalTensor target;
  std::string reduction;
  NamedArguments options;  // the values of kDistillationOptions

  bool scalar() const { return reduction != "none"; }
  int64_t ignore_index() const { return value_of(options, "ignore_index").toInt(); }
  /// Returns the number of tokens that are not ignored, (), fp64.
  Tensor count() const;
  /// Returns the result, from the tokens' losses.
  Tensor reduce(const Tensor& loss) const;
};

/// Calls linear_distillation_rows through the dispatcher, and returns the results in the call's shapes.
/// `upstream` is the gradient of the tokens' losses, () or in their shape; undefined if no gradients are
/// requested.
DistillationResult distillation_rows(const DistillationCall& call, const Tensor& upstream, const Mask& mask);

}  // namespace shoestring::losses
