#pragma once

// The parts that cross_entropy and linear_cross_entropy share: their options, the checks, and the reduction
// of the tokens' losses to a result.

#include <array>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <shoestring/losses/ops.h>

#include "core/arguments.h"
#include "losses/cross_entropy_table.h"

namespace shoestring::losses {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

/// Lists the options that are numbers of the formulas. `each` takes the name, the value, the member of
/// CrossEntropyFormula, a text that says what is expected, and whether the value is as expected.
template <class Options, class Each>
void each_number(Options& o, Each each) {
  using Formula = kernels::CrossEntropyFormula;
  each("label_smoothing", o.label_smoothing(), &Formula::label_smoothing, "a number in [0, 1)",
       o.label_smoothing() >= 0 && o.label_smoothing() < 1);
  each("softcap", o.softcap(), &Formula::softcap, "0 (none) or a positive number", o.softcap() >= 0);
  each("logit_scale", o.logit_scale(), &Formula::logit_scale, "a number that is not 0", o.logit_scale() != 0);
  each("z_loss", o.z_loss(), &Formula::z_loss, "a number of at least 0", o.z_loss() >= 0);
}

/// Lists the options of the loss of a token, as arguments of an operator (core/arguments.h).
template <class Options, class Visitor>
void visit_token_loss(Options& o, Visitor& visit) {
  visit("class_weights", o.class_weights());
  visit("ignore_index", o.ignore_index());
  each_number(o, [&](const char* name, auto& x, auto...) { visit(name, x); });
  visit("target2", o.target2());
  visit("mix", o.mix());
}

/// Lists the options that select the tokens and reduce their losses.
template <class Options, class Visitor>
void visit_reduction(Options& o, Visitor& visit) {
  visit("reduction", o.reduction());
  visit("token_weights", o.token_weights());
  visit("shift", o.shift());
  visit("hard_fraction", o.hard_fraction());
}

/// Raises unless x is a finite number for which `holds` is true.
void check_number(const char* op, const char* name, const char* expected, double x, bool holds);

/// The targets of tokens. With target2, each token has two targets: `target` with the part `mix` of its loss,
/// shape () or target's, and target2 with the part 1 - mix.
struct Targets {
  Tensor target;
  OptionalTensor target2, mix;
  int64_t ignore_index;

  /// Checks shapes, dtypes and devices.
  void check(const char* op) const;
  /// Returns which tokens have a target that is not ignored.
  Tensor counted() const;
  Tensor ignored() const { return target2 ? counted().logical_not() : target.eq(ignore_index); }
  /// Returns for each token the sum of the values that of_target(target) returns for its targets, fp64, times
  /// their parts. The part of an ignored target is 0.
  template <class OfTarget>
  Tensor sum(OfTarget of_target) const;
  /// Returns the sum of the parts of each token, which is 1 unless it has an ignored target; fp64.
  Tensor parts() const;
};

/// Reads the targets of single tokens on the CPU.
class TargetsOnCpu {
 public:
  explicit TargetsOnCpu(const Targets& targets);
  kernels::CrossEntropyTargets<double> operator[](int64_t token) const {
    return kernels::targets_of(first_[token], second_[token], mix_[token * stride_], ignore_index_);
  }

 private:
  static constexpr double kWhole = 1;
  Tensor target_, target2_, values_;  // the memory to which the pointers refer
  const int64_t *first_, *second_;
  const double* mix_ = &kWhole;
  int64_t stride_ = 0, ignore_index_;
};

/// The loss and the statistics (log-sum-exp, entropy, argmax) of each row of logits.
struct RowsResult {
  Tensor loss, lse;        // loss and lse have target's shape and dtype fp32 (fp64 for fp64 inputs)
  Tensor entropy, argmax;  // entropy and argmax are undefined unless stats are requested

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit("loss", self.loss);
    visit("lse", self.lse);
    visit("entropy", self.entropy);
    visit("argmax", self.argmax);
  }
  /// Replaces undefined results by empty tensors, which an operator can return; `like` gives their device,
  /// and the dtype by compute_type().
  void fill(const Tensor& like);
  /// Returns the results in target's shape, without the empty ones.
  void view(const Tensor& target, bool stats);
};

/// The results of the operators whose names end in with_stats.
struct StatsResult : CrossEntropyStats {
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit("loss", self.loss);
    visit("token_loss", self.token_loss);
    visit("lse", self.lse);
    visit("entropy", self.entropy);
    visit("argmax", self.argmax);
    visit("correct", self.correct);
  }
};

/// A call of cross_entropy or linear_cross_entropy, or of the operator that computes the rows of logits for
/// it. `input` is the argument `logits` (..., vocab) or `hidden` (..., features), `target` has the shape
/// (...).
struct TokenProblem {
  /// Errors name the operator `op`, the argument `name` for `input`, and its dimension `last`.
  TokenProblem(const char* op, const char* name, const char* last) : op(op), name(name), last(last) {}

  const char *op, *name, *last;
  Tensor input, target;
  LinearCrossEntropyOptions options;
  c10::SymInt classes;
  bool stats = false;
  // For the rows: upstream gradients of loss, lse and entropy, each of shape () or of target's shape.
  OptionalTensor grad_loss, grad_lse, grad_entropy;

  template <class Self, class Visitor>
  static void visit_upstream(Self& self, Visitor& visit) {
    visit("grad_loss", self.grad_loss);
    visit("grad_lse", self.grad_lse);
    visit("grad_entropy", self.grad_entropy);
  }
  /// Sets the upstream gradients; an undefined tensor means no gradient.
  void set_upstream(const std::array<Tensor, 3>& gradients);

  /// Checks shapes and dtypes of `input` and `target`.
  void check_tokens() const;
  /// Checks the arguments of a call, and shifts the target by one token if the option `shift` is set.
  void prepare();
  /// Checks the arguments of the rows that both operators have, except for the values of the targets.
  void check_rows() const;
  Targets targets() const { return {target, options.target2(), options.mix(), options.ignore_index()}; }
  kernels::CrossEntropyFormula formula() const;
  /// Allocates the results of all rows. With `zeros` they hold the results of ignored tokens, otherwise they
  /// are uninitialised.
  RowsResult allocate(bool zeros) const;
  /// Returns the indices of the rows that are not ignored, on the CPU. Raises for targets that are neither a
  /// class nor ignore_index.
  std::vector<int64_t> rows_that_count(const TargetsOnCpu& targets) const;
  /// Calls `apply`, which records the call for autograd and returns the results of the operator. Token
  /// weights that require a gradient are applied to these results by plain autograd operations.
  std::vector<Tensor> record(c10::function_ref<std::vector<Tensor>()> apply);

 private:
  // Checks the option `mix` and brings it into the shape () or target's, on target's device.
  void prepare_mix();
};

/// The parameters that the CPU kernel uses for all rows. bias and class_weights are contiguous and of dtype
/// T, or undefined. total_weight is the sum of the class weights.
template <class T>
kernels::CrossEntropyRule<T> rule_of(const TokenProblem& p, const Tensor& bias, const Tensor& class_weights,
                                     double total_weight) {
  const auto pointer = [](const Tensor& t) { return t.defined() ? t.template const_data_ptr<T>() : nullptr; };
  kernels::CrossEntropyRule<T> rule{};
  static_cast<kernels::CrossEntropyFormula&>(rule) = p.formula();
  rule.vocab = p.classes.expect_int();
  rule.bias = pointer(bias);
  rule.class_weights = pointer(class_weights);
  rule.total_weight = class_weights.defined() ? total_weight : static_cast<double>(rule.vocab);
  rule.stats = p.stats;
  return rule;
}

/// A per-token factor of the gradients on the CPU: a tensor with one value per token, a scalar for all
/// tokens, or undefined, which counts as 0.
template <class T>
class Factor {
 public:
  explicit Factor(const OptionalTensor& factor)
      : values_(factor ? factor->to(c10::CppTypeToScalarType<T>::value).contiguous() : Tensor()),
        stride_(factor && factor->dim() != 0) {}
  double operator[](int64_t token) const {
    return values_.defined() ? values_.template const_data_ptr<T>()[token * stride_] : 0;
  }

 private:
  Tensor values_;
  int64_t stride_;
};

/// Holds what backward needs to convert the gradients of the results into those of the tokens.
struct TokenUpstream {
  Tensor factor;        // Reduction::factor()
  Tensor share, slope;  // Reduction::share and slope_of_z(); undefined unless the tokens' losses are results
  double z_loss = 0;

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit("factor", self.factor);
    visit("share", self.share);
    visit("slope", self.slope);
    visit("z_loss", self.z_loss);
  }
  /// Returns the upstream gradients of each token's loss, lse and entropy in the dtype `compute`. `upstream`
  /// holds the gradients of the operator's results: the loss and, with stats, the tokens' loss, lse and
  /// entropy. An undefined tensor means no gradient.
  std::array<Tensor, 3> of_tokens(std::vector<Tensor> upstream, at::ScalarType compute) const;
};

/// Computes the result of a reduction from the tokens' losses: sum(weights * loss) / total. Undefined
/// `weights` are all 1; an undefined `total` is 1.
///
/// A mean divides the cross-entropies by the sum of the targets' class weights (each times its token weight).
/// The z terms, z_loss * lse^2, have no class weights. They are divided by the number of tokens (or by the
/// sum of the token weights), as in Liger Kernel. `share` is the divisor of the cross-entropies divided by
/// the divisor of the z terms. If the class weights are divided by `share`, both terms can be divided by the
/// divisor of the z terms.
struct Reduction {
  explicit Reduction(const TokenProblem& p);
  /// The reduction of losses without weights: their mean, if `total` is defined, or their sum. Without
  /// `scalar`, no reduction.
  Reduction(bool scalar, Tensor total) : total(std::move(total)), scalar(scalar) {}

  Tensor weights;  // weight of each token's loss, shape (...)
  Tensor total;    // divisor of a mean, shape (), fp64
  // The divisor of the cross-entropies over the divisor of the z terms, shape (), fp64. Undefined without
  // class weights or without z_loss, or if the reduction is no mean.
  Tensor share;
  double z_loss = 0;  // the caller's z_loss if `share` is defined, otherwise 0
  // the sum of the parts of each token's targets, shape (...), fp64; undefined without target2 and if the
  // reduction is no mean
  Tensor parts;
  bool scalar;
  // whether the operator also returns the tokens' losses, so that the result must not share their memory
  bool copies = false;

  /// Takes the weights that this reduction applies out of the options: the token weights, and the member
  /// `share` of the class weights.
  void balance(TokenProblem& p) const;
  /// Converts the tokens' losses with the caller's class weights to losses with class weights divided by the
  /// member `share`. The z terms do not change, because they have no class weights.
  Tensor balanced(const Tensor& loss, const Tensor& lse) const;
  /// Returns half the derivative of the tokens' z terms with respect to their lse, divided by z_loss.
  Tensor slope_of_z(const Tensor& lse) const {
    return parts.defined() ? lse.mul(parts.to(lse.scalar_type())) : lse;
  }
  /// Reduces the tokens' losses to the result: a scalar, or with reduction='none' the weighted losses.
  Tensor apply(const Tensor& loss) const;
  /// Returns the results of the operator, from those of the rows after balance().
  std::vector<Tensor> results(const TokenProblem& p, const RowsResult& rows) const;
  /// Returns the gradient of the result with respect to the tokens' losses, shape () or (...), of `dtype`.
  /// With reduction='none', this gradient is the token weights. An undefined return value means a gradient of
  /// 1.
  Tensor factor(at::ScalarType dtype) const;
  /// `lse` is that of the tokens, or undefined if the tokens' losses are not results.
  TokenUpstream upstream(Tensor factor, const Tensor& lse) const;
};

/// Keeps the fraction hard_fraction of the tokens, those with the largest losses, and sets the targets of all
/// other tokens to ignore_index. An extra pass computes the losses. Does nothing if hard_fraction is 1.
void keep_largest(TokenProblem& p, Tensor loss);
template <class Problem>
void keep_hardest(Problem& p) {
  if (p.options.hard_fraction() == 1 || p.target.sym_numel() == 0) return;
  const bool stats = std::exchange(p.stats, false);
  Tensor loss = p.losses().loss;
  p.stats = stats;
  keep_largest(p, std::move(loss));
}

/// Returns the results of a call that needs no gradient, on every device.
template <class Problem>
std::vector<Tensor> without_gradients(Problem p) {
  keep_hardest(p);
  const Reduction reduction(p);
  reduction.balance(p);
  return reduction.results(p, p.losses());
}

/// Replaces the arguments of an operator on the stack by its results.
template <class Arguments>
void replace_arguments(torch::jit::Stack* stack, std::vector<Tensor> results) {
  torch::jit::drop(*stack, count_of<Arguments>());
  for (Tensor& t : results) torch::jit::push(*stack, std::move(t));
}

/// Boxed kernel of an operator that computes rows: the function `run` does so for checked arguments.
template <class Rows, auto run>
void boxed_rows(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  Rows rows = read_fields<Rows>(*stack);
  rows.check();
  auto results = run(rows);
  results.fill(rows.input);
  torch::jit::drop(*stack, count_of<Rows>());
  push_fields(*stack, results);
}

}  // namespace shoestring::losses
