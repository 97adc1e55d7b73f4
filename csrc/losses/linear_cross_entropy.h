#pragma once

// What the CPU and the CUDA side of linear_cross_entropy share, and what autograd needs of it.

#include <array>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include "losses/cross_entropy.h"
#include "losses/head.h"

namespace shoestring::losses {

constexpr const char* kLinearCrossEntropyOp = "linear_cross_entropy";

/// The arguments of linear_cross_entropy_rows, checked but for what the targets hold.
struct LinearCrossEntropyProblem : Head, RowsProblem {
  explicit LinearCrossEntropyProblem(const BoxedArguments& arguments);

  OptionalTensor weight_grad;  // what the weight's gradient is added to
  double filter_eps;
  bool averaged;
  int64_t workspace_mb;
  Mask mask;
};

struct LinearCrossEntropyResult : RowsResult {
  Gradients gradients;
};

/// Registers a device's linear_cross_entropy_rows.
using LinearCrossEntropyRun = LinearCrossEntropyResult (*)(const LinearCrossEntropyProblem&);
void push_linear_cross_entropy_rows(torch::jit::Stack* stack, const c10::OperatorHandle& op,
                                    const LinearCrossEntropyResult& result, const Tensor& hidden);
template <LinearCrossEntropyRun run>
void boxed_linear_cross_entropy_rows(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const LinearCrossEntropyProblem problem(BoxedArguments(op, *stack));
  push_linear_cross_entropy_rows(stack, op, run(problem), problem.hidden);
}

/// Those that linear_cross_entropy_rows has as well.
constexpr const char* kLinearCrossEntropyOptions[] = {
    "ignore_index", "label_smoothing", "softcap", "logit_scale", "z_loss", "filter_eps", "workspace_mb"};

/// A call of linear_cross_entropy: input is hidden.
struct LinearCrossEntropyCall : Head, TokenCall {
  LinearCrossEntropyCall() = default;
  LinearCrossEntropyCall(const BoxedArguments& arguments, bool stats);

  OptionalTensor weight_grad;
  std::optional<double> grad_scale;
};

/// linear_cross_entropy_rows through the dispatcher, with the results in the shapes of the call. `upstream`,
/// of loss, lse and entropy, in target's shape or (); undefined tensors for those that there are none of.
LinearCrossEntropyResult linear_cross_entropy_rows(const LinearCrossEntropyCall& call,
                                                   const std::array<Tensor, 3>& upstream, const Mask& mask);
inline void keep_hardest(LinearCrossEntropyCall& call) {
  keep_hardest(call, [&] { return linear_cross_entropy_rows(call, {}, {}).loss; });
}

}  // namespace shoestring::losses
