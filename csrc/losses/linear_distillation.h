#pragma once

// What the CPU and the CUDA side of linear_distillation share, and what autograd needs of it.

#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include "losses/head.h"
#include "losses/linear_distillation_table.h"

namespace shoestring::losses {

constexpr const char* kDistillationOp = "linear_distillation";

struct DistillationResult {
  Tensor loss;  // (tokens), compute type
  Gradients gradients;
};

/// The arguments of linear_distillation_rows, checked: a student's head, and its teacher's.
struct DistillationProblem : Head {
  explicit DistillationProblem(const BoxedArguments& arguments);

  bool wants_gradient() const { return any(mask); }

  Head teacher;
  OptionalTensor target;     // (tokens)
  OptionalTensor grad_loss;  // () or (tokens)
  int64_t ignore_index;
  kernels::Divergence divergence;
  double beta, temperature;
  bool averaged;
  int64_t workspace_mb;
  Mask mask;
};

/// Registers a device's linear_distillation_rows.
using DistillationRun = DistillationResult (*)(const DistillationProblem&);
void push_distillation_rows(torch::jit::Stack* stack, const c10::OperatorHandle& op,
                            const DistillationResult& result, const Tensor& hidden);
template <DistillationRun run>
void boxed_distillation_rows(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const DistillationProblem problem(BoxedArguments(op, *stack));
  push_distillation_rows(stack, op, run(problem), problem.hidden);
}

/// Those that linear_distillation_rows has as well.
constexpr const char* kDistillationOptions[] = {"ignore_index", "divergence", "beta", "temperature",
                                                "workspace_mb"};

/// A call of linear_distillation.
struct DistillationCall : Head {
  DistillationCall() = default;
  explicit DistillationCall(const BoxedArguments& arguments);

  Head teacher;
  OptionalTensor target;
  std::string reduction;
  NamedArguments options;  // kOptions

  bool scalar() const { return reduction != "none"; }
  int64_t ignore_index() const { return value_of(options, "ignore_index").toInt(); }
  /// How many tokens count: (), fp64.
  Tensor count() const;
  /// The result, of the losses of tokens.
  Tensor reduce(const Tensor& loss) const;
};

/// linear_distillation_rows through the dispatcher, with the results in the shapes of the call. `upstream`:
/// of the tokens' losses, in their shape or (); undefined without gradients.
DistillationResult distillation_rows(const DistillationCall& call, const Tensor& upstream, const Mask& mask);

}  // namespace shoestring::losses
