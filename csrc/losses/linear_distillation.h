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
  Tensor loss;  // loss of each token, shape (tokens), fp32 or fp64
  Gradients gradients;
};

/// The arguments of _linear_distillation_rows, checked by the constructor. The base class Head is the
/// student's output layer.
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

/// Boxed kernel of the operator _linear_distillation_rows. The argument `run` is the function that computes
/// all rows on the CPU or on CUDA.
using DistillationRun = DistillationResult (*)(const DistillationProblem&);
void push_distillation_rows(torch::jit::Stack* stack, const c10::OperatorHandle& op,
                            const DistillationResult& result, const Tensor& hidden);
template <DistillationRun run>
void boxed_distillation_rows(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const DistillationProblem problem(BoxedArguments(op, *stack));
  push_distillation_rows(stack, op, run(problem), problem.hidden);
}

/// Options of linear_distillation that are passed on unchanged to _linear_distillation_rows.
constexpr const char* kDistillationOptions[] = {"ignore_index", "divergence", "beta", "temperature",
                                                "workspace_mb"};

/// The arguments of one call of linear_distillation.
struct DistillationCall : Head {
  DistillationCall() = default;
  explicit DistillationCall(const BoxedArguments& arguments);

  Head teacher;
  OptionalTensor target;
  std::string reduction;
  NamedArguments options;  // the caller's values of the options that kDistillationOptions names, in its order

  bool scalar() const { return reduction != "none"; }
  int64_t ignore_index() const { return value_of(options, "ignore_index").toInt(); }
  /// Returns the number of tokens that are not ignored, as a tensor of shape (), fp64.
  Tensor count() const;
  /// Reduces the tokens' losses to their mean or sum. With reduction='none' it returns them unchanged.
  Tensor reduce(const Tensor& loss) const;
};

/// Calls _linear_distillation_rows through the dispatcher. Returns the losses in the shape of the tokens, and
/// the gradients in the shapes of their inputs. `upstream` is the gradient of the tokens' losses: a scalar
/// for all tokens, or one number per token. It is undefined if no gradients are requested.
DistillationResult distillation_rows(const DistillationCall& call, const Tensor& upstream, const Mask& mask);

}  // namespace shoestring::losses
