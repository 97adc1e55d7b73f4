#pragma once

// Shared declarations of the CPU, CUDA and autograd implementations of linear_cross_entropy.

#include <array>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <shoestring/losses/vocab_parallel.h>

#include "losses/head.h"
#include "losses/token_loss.h"

namespace shoestring::losses {

constexpr const char* kLinearCrossEntropyOp = "linear_cross_entropy";

/// The loss and statistics of each token, and the requested gradients of the inputs.
struct LinearCrossEntropyResult : RowsResult {
  Gradients gradients;

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    RowsResult::fields(self, visit);
    visit_gradients(self.gradients, visit);
  }
  void fill(const Tensor& like) {
    RowsResult::fill(like);
    fill_gradients(gradients, like);
  }
};

/// Lists the first arguments of the operators of linear_cross_entropy, of which `call` holds all but hidden.
template <class Hidden, class Call, class Visitor>
void visit_tensors(Hidden& hidden, Call& call, Visitor& visit) {
  visit("hidden", hidden);
  visit("weight", call.weight);
  visit("target", call.target);
  visit("bias", call.bias);
  visit.keywords();
}

/// A call of linear_cross_entropy, or of the operator that computes its rows. The member `input` holds the
/// argument `hidden`.
struct LinearCrossEntropyProblem : TokenProblem {
  static constexpr const char* kOp = kLinearCrossEntropyOp;

  LinearCrossEntropyProblem() : TokenProblem(kOp, "hidden", "features") {}
  LinearCrossEntropyProblem(const Tensor& hidden, const Tensor& weight, const Tensor& target,
                            const OptionalTensor& bias, const LinearCrossEntropyOptions& options);

  Tensor weight;
  OptionalTensor bias;
  // For the rows: whether the upstream gradients are about 1 / tokens, and the requested gradients.
  bool averaged = false;
  Mask mask{};

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit_rows(self, visit);
    visit_reduction(self.options, visit);
    visit("upstream_grad", self.options.upstream_grad());
  }
  /// Lists the arguments that the operator for the rows has, too.
  template <class Self, class Visitor>
  static void visit_rows(Self& self, Visitor& visit) {
    visit_tensors(self.input, self, visit);
    visit_head(self.options, visit);
    visit_token_loss(self.options, visit);
    visit("filter_eps", self.options.filter_eps());
    visit.changed("weight_grad", self.options.weight_grad());
    visit("workspace_mb", self.options.workspace_mb());
  }
  /// Reads and checks the arguments of an operator.
  static LinearCrossEntropyProblem read(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  const OptionalTensor& weight_grad() const { return options.weight_grad(); }
  const std::optional<double>& upstream_grad() const { return options.upstream_grad(); }
  Reduction take_reduction() {
    Reduction reduction(*this);
    reduction.balance(*this);
    return reduction;
  }
  /// Calls _linear_cross_entropy_rows through the dispatcher. Returns the losses and statistics in target's
  /// shape, and the gradients in the shapes of their inputs. `upstream` holds the gradients of each token's
  /// loss, lse and entropy: shape (), target's shape, or undefined for no gradient.
  LinearCrossEntropyResult rows(const std::array<Tensor, 3>& upstream, const Mask& mask) const;
  RowsResult losses() const { return rows({}, {}); }
  std::vector<Tensor> results(const Reduction& reduction, const RowsResult& rows) const {
    return reduction.results(*this, rows);
  }
};

/// The same as arguments of _linear_cross_entropy_rows.
struct LinearCrossEntropyRowsArguments : LinearCrossEntropyProblem {
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit_rows(self, visit);
    visit_upstream(self, visit);
    visit("averaged", self.averaged);
    visit("stats", self.stats);
    visit("output_mask", self.mask);
  }
  /// Checks all arguments except for the values of the targets.
  void check();
};

/// Returns whether linear_cross_entropy_by_tiles() computes the rows of this problem on this CPU. `tokens` is
/// the number of tokens that are not ignored.
bool fits_tiles(const LinearCrossEntropyProblem& p, int64_t tokens);

/// Computes the rows for bf16 hidden states on a CPU with AMX. `rows` holds the numbers of the tokens that
/// are not ignored. The weight is bf16, or fp32 and rounded to bf16 while it is packed.
LinearCrossEntropyResult linear_cross_entropy_by_tiles(const LinearCrossEntropyProblem& p,
                                                       const std::vector<int64_t>& rows);

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

}  // namespace shoestring::losses
