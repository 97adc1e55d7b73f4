#pragma once

// Shared declarations of the CPU, CUDA and autograd implementations of linear_cross_entropy.

#include <array>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>
#include <shoestring/vocab_parallel.h>

#include "losses/cross_entropy.h"
#include "losses/head.h"

namespace shoestring::losses {

constexpr const char* kLinearCrossEntropyOp = "linear_cross_entropy";

/// Visits the first arguments of the operators of linear_cross_entropy, of which `call` holds all but hidden.
template <class Hidden, class Call, class Visitor>
void visit_tensors(Hidden& hidden, Call& call, Visitor& visit) {
  visit("hidden", hidden);
  visit("weight", call.weight);
  visit("target", call.target);
  visit("bias", call.bias);
  visit.keywords();
}

/// The arguments of one call of linear_cross_entropy. The member `input` of TokenCall holds the argument
/// `hidden`.
struct LinearCrossEntropyCall : TokenCall {
  Tensor weight;
  OptionalTensor bias;

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit_tensors(self.input, self, visit);
    visit_rows(self.options, visit);
    visit_reduction(self.options, visit);
    visit("upstream_grad", self.options.upstream_grad());
  }

  /// Lists the options that the operator for the rows has, too.
  template <class Options, class Visitor>
  static void visit_rows(Options& o, Visitor& visit) {
    visit_head(o, visit);
    visit_token_loss(o, visit);
    visit("filter_eps", o.filter_eps());
    visit.changed("weight_grad", o.weight_grad());
    visit("workspace_mb", o.workspace_mb());
  }

  /// Reads and checks the arguments of an operator.
  static LinearCrossEntropyCall read(const torch::jit::Stack& stack, bool stats);
  Head head() const { return {input, weight, bias, options}; }
  Mask require_grad() const {
    return losses::require_grad(input, weight, bias, options.lora_hidden(), options.lora_B());
  }
};

/// The arguments of linear_cross_entropy_shard.
template <class Options>
struct LinearCrossEntropyShardCall {
  Tensor hidden, weight, target;
  OptionalTensor bias;
  int64_t first_class = 0;
  Options options;

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit_tensors(self.hidden, self, visit);
    visit.required("first_class", self.first_class);
    visit_head(self.options, visit);
    visit("ignore_index", self.options.ignore_index());
    visit("softcap", self.options.softcap());
    visit("logit_scale", self.options.logit_scale());
    visit.changed("weight_grad", self.options.weight_grad());
    visit("workspace_mb", self.options.workspace_mb());
  }
};

/// The results of linear_cross_entropy_shard.
struct ShardResult : LinearCrossEntropyShard {
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit("lse", self.lse);
    visit("target_logit", self.target_logit);
  }
};

/// The results of _linear_cross_entropy_shard.
struct ShardLoss {
  Tensor lse, target_loss;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit("lse", self.lse);
    visit("target_loss", self.target_loss);
  }
};

/// The arguments of _linear_cross_entropy_rows.
struct LinearCrossEntropyRowsCall : RowsCall {
  Tensor weight;
  OptionalTensor bias;
  bool averaged = false;
  Mask mask{};

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit_tensors(self.input, self, visit);
    LinearCrossEntropyCall::visit_rows(self.options, visit);
    upstream(self, visit);
    visit("averaged", self.averaged);
    visit("stats", self.stats);
    visit("output_mask", self.mask);
  }
};

/// The checked arguments of _linear_cross_entropy_rows. The constructor checks all of them except for the
/// values of the targets.
struct LinearCrossEntropyProblem : Head, RowsProblem {
  explicit LinearCrossEntropyProblem(const LinearCrossEntropyRowsCall& call);

  OptionalTensor weight_grad;  // fp32 tensor to which the gradient of the weight is added
  double filter_eps;
  bool averaged;
  int64_t workspace_mb;
  Mask mask;
};

/// The loss and statistics of each token, and the requested gradients of the inputs.
struct LinearCrossEntropyResult : RowsResult {
  Gradients gradients;

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    RowsResult::fields(self, visit);
    visit_gradients(self.gradients, visit);
  }
};

/// Boxed kernel of the operator _linear_cross_entropy_rows. The argument `run` is the function that computes
/// all rows on the CPU or on CUDA.
using LinearCrossEntropyRun = LinearCrossEntropyResult (*)(const LinearCrossEntropyProblem&);
void run_linear_cross_entropy_rows(torch::jit::Stack* stack, LinearCrossEntropyRun run);
template <LinearCrossEntropyRun run>
void boxed_linear_cross_entropy_rows(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  run_linear_cross_entropy_rows(stack, run);
}

/// Calls _linear_cross_entropy_rows through the dispatcher. Returns the losses and statistics in target's
/// shape, and the gradients in the shapes of their inputs. `upstream` holds the gradients of each token's
/// loss, lse and entropy: shape (), target's shape, or undefined for no gradient.
LinearCrossEntropyResult linear_cross_entropy_rows(const LinearCrossEntropyCall& call,
                                                   const std::array<Tensor, 3>& upstream, const Mask& mask);

/// Computes linear_cross_entropy, and with kStats linear_cross_entropy_with_stats, for a call that needs no
/// gradient. Replaces the arguments on the stack by the results. It serves every device.
template <bool kStats>
void linear_cross_entropy_without_gradients(LinearCrossEntropyCall call, torch::jit::Stack* stack);
inline void keep_hardest(LinearCrossEntropyCall& call) {
  keep_hardest(call, [&] { return linear_cross_entropy_rows(call, {}, {}).loss; });
}

}  // namespace shoestring::losses
