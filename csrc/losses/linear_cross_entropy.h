#pragma once

// Shared declarations of the CPU, CUDA and autograd implementations of linear_cross_entropy.

#include <array>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include "losses/cross_entropy.h"
#include "losses/head.h"

namespace shoestring::losses {

constexpr const char* kLinearCrossEntropyOp = "linear_cross_entropy";

/// The arguments of _linear_cross_entropy_rows. The constructor checks all of them except for the values of
/// the targets.
struct LinearCrossEntropyProblem : Head, RowsProblem {
  explicit LinearCrossEntropyProblem(const BoxedArguments& arguments);

  OptionalTensor weight_grad;  // fp32 tensor to which the gradient of the weight is added
  double filter_eps;
  bool averaged;
  int64_t workspace_mb;
  Mask mask;
};

/// The loss and statistics of each token, and the requested gradients of the inputs.
struct LinearCrossEntropyResult : RowsResult {
  Gradients gradients;
};

/// Boxed kernel of the operator _linear_cross_entropy_rows. The argument `run` is the function that computes
/// all rows on the CPU or on CUDA.
using LinearCrossEntropyRun = LinearCrossEntropyResult (*)(const LinearCrossEntropyProblem&);
void push_linear_cross_entropy_rows(torch::jit::Stack* stack, const c10::OperatorHandle& op,
                                    const LinearCrossEntropyResult& result, const Tensor& hidden);
template <LinearCrossEntropyRun run>
void boxed_linear_cross_entropy_rows(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const LinearCrossEntropyProblem problem(BoxedArguments(op, *stack));
  push_linear_cross_entropy_rows(stack, op, run(problem), problem.hidden);
}

/// Options of linear_cross_entropy that are passed on unchanged to _linear_cross_entropy_rows.
constexpr const char* kLinearCrossEntropyOptions[] = {
    "ignore_index", "label_smoothing", "softcap", "logit_scale", "z_loss", "filter_eps", "workspace_mb"};

/// The arguments of one call of linear_cross_entropy. The member `input` of TokenCall holds the argument
/// `hidden`.
struct LinearCrossEntropyCall : Head, TokenCall {
  LinearCrossEntropyCall() = default;
  LinearCrossEntropyCall(const BoxedArguments& arguments, bool stats);

  OptionalTensor weight_grad;
  std::optional<double> upstream_grad;
};

/// Calls _linear_cross_entropy_rows through the dispatcher. Returns the losses and statistics in target's
/// shape, and the gradients in the shapes of their inputs. `upstream` holds the gradients of each token's
/// loss, lse and entropy: shape (), target's shape, or undefined for no gradient.
LinearCrossEntropyResult linear_cross_entropy_rows(const LinearCrossEntropyCall& call,
                                                   const std::array<Tensor, 3>& upstream, const Mask& mask);

/// Boxed kernel of linear_cross_entropy, and with kStats of linear_cross_entropy_with_stats, for calls that
/// need no gradient. It serves every device.
template <bool kStats>
void linear_cross_entropy_without_gradients(const c10::OperatorHandle& op, torch::jit::Stack* stack);
inline void keep_hardest(LinearCrossEntropyCall& call) {
  keep_hardest(call, [&] { return linear_cross_entropy_rows(call, {}, {}).loss; });
}

}  // namespace shoestring::losses
