#pragma once

// Declarations that cross_entropy and linear_cross_entropy share, followed by the declarations of
// cross_entropy alone.

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <shoestring/ops.h>

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

/// Argument checks. check_tokens() expects `input` of shape (..., `last`) and floating dtype, and an int64
/// target of shape (...). check_weights() expects a floating tensor of the given shape, with one weight per
/// class or token. check_number() expects a finite number for which `holds` is true.
void check_tokens(const char* op, const char* name, const char* last, const Tensor& input,
                  const Tensor& target);
void check_weights(const char* op, const char* name, const OptionalTensor& weights, c10::SymIntArrayRef shape,
                   const Tensor& input);
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

/// The arguments that the operators which compute a loss for each row of logits have in common. `input` is
/// the argument `logits` (..., vocab) or `hidden` (tokens, features), `target` has the shape of the rows.
struct RowsCall {
  Tensor input, target;
  LinearCrossEntropyOptions options;
  // upstream gradients of loss, lse and entropy, each of shape () or of target's shape
  OptionalTensor grad_loss, grad_lse, grad_entropy;
  bool stats = false;

  template <class Self, class Visitor>
  static void upstream(Self& self, Visitor& visit) {
    visit("grad_loss", self.grad_loss);
    visit("grad_lse", self.grad_lse);
    visit("grad_entropy", self.grad_entropy);
  }
};

/// The checked arguments of _cross_entropy_rows or _linear_cross_entropy_rows. The constructor checks all
/// arguments except for the values of the targets.
struct RowsProblem : kernels::CrossEntropyFormula {
  RowsProblem(const char* op, const RowsCall& call, c10::SymInt vocab);
  const kernels::CrossEntropyFormula& formula() const { return *this; }

  const char* op;
  Tensor target;
  OptionalTensor class_weights, grad_loss, grad_lse, grad_entropy, target2, mix;
  int64_t ignore_index;
  bool stats;
  c10::SymInt classes;

  Targets targets() const { return {target, target2, mix, ignore_index}; }
};

/// The loss and the statistics (log-sum-exp, entropy, argmax) of each row of logits.
struct RowsResult {
  Tensor loss, lse;        // loss and lse have target's shape and dtype fp32 (fp64 for fp64 inputs)
  Tensor entropy, argmax;  // entropy and argmax are undefined unless stats are requested

  /// As results of an operator, entropy and argmax are empty tensors unless stats are requested.
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit("loss", self.loss);
    visit("lse", self.lse);
    visit("entropy", self.entropy);
    visit("argmax", self.argmax);
  }
  /// Replaces undefined results by empty tensors; `like` gives their device, and the dtype by compute_type().
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

/// Returns the number of tokens whose most likely class is their target, as int64 of shape (). argmax is -1
/// for ignored tokens.
Tensor count_correct(const Tensor& argmax, const Tensor& target);

/// The arguments of one call of a cross-entropy operator, with or without stats. `input` holds the argument
/// `hidden` (..., features) or `logits` (..., vocab). `target` has the shape (...).
struct TokenCall {
  Tensor input, target;
  LinearCrossEntropyOptions options;
  bool stats = false;
  c10::SymInt classes;

  /// Checks the arguments, and shifts the target by one token if the option `shift` is set. `name` and `last`
  /// are those of check_tokens().
  void prepare(const char* op, const char* name, const char* last, c10::SymInt vocab, bool with_stats);
  Targets targets() const { return {target, options.target2(), options.mix(), options.ignore_index()}; }

 private:
  // Checks the option `mix` and brings it into the shape () or target's, on target's device.
  void prepare_mix(const char* op);
};

/// Keeps the fraction hard_fraction of the tokens, those with the largest losses, and sets the targets of all
/// other tokens to ignore_index. `losses` is a function that computes the loss of each token in an extra
/// pass. Does nothing if hard_fraction is 1.
void keep_largest(TokenCall& call, Tensor loss);
template <class Losses>
void keep_hardest(TokenCall& call, Losses losses) {
  if (call.options.hard_fraction() == 1 || call.target.sym_numel() == 0) return;
  const bool stats = std::exchange(call.stats, false);
  Tensor loss = losses();
  call.stats = stats;
  keep_largest(call, std::move(loss));
}

/// Computes the result of a reduction from the tokens' losses: sum(weights * loss) / total. Undefined
/// `weights` are all 1; an undefined `total` is 1.
///
/// A mean divides the cross-entropies by the sum of the targets' class weights (each times its token weight).
/// The z terms, z_loss * lse^2, have no class weights. They are divided by the number of tokens (or by the
/// sum of the token weights), as in Liger Kernel. `share` is the divisor of the cross-entropies divided by
/// the divisor of the z terms. If the class weights are divided by `share`, both terms can be divided by the
/// divisor of the z terms.
struct Reduction {
  explicit Reduction(const TokenCall& call);

  Tensor weights;  // weight of each token's loss, shape (...)
  Tensor total;    // divisor of a mean, shape (), fp64
  // The divisor of the cross-entropies over the divisor of the z terms, shape (), fp64. Undefined without
  // class weights or without z_loss, or if the reduction is no mean.
  Tensor share;
  double z_loss = 0;  // the caller's z_loss if `share` is defined, otherwise 0
  // the sum of the parts of each token's targets, shape (...), fp64; undefined without target2 and if the
  // reduction is no mean
  Tensor parts;

  /// Divides the class weights of the call by the member `share`, so that apply() can divide the whole loss
  /// of a token by `total`.
  void balance(TokenCall& call) const;
  /// balanced() converts the tokens' losses with the caller's class weights to losses with class weights
  /// divided by the member `share`. original() converts them back. The z terms do not change, because they
  /// have no class weights.
  Tensor balanced(const Tensor& loss, const Tensor& lse) const;
  Tensor original(const Tensor& loss, const Tensor& lse) const;
  /// Returns half the derivative of the tokens' z terms with respect to their lse, divided by z_loss.
  Tensor slope_of_z(const Tensor& lse) const {
    return parts.defined() ? lse.mul(parts.to(lse.scalar_type())) : lse;
  }
  /// Reduces the tokens' losses to the result: a scalar, or with reduction='none' the weighted losses.
  Tensor apply(const Tensor& loss) const;
  /// Returns the gradient of the result with respect to the tokens' losses, shape () or (...), of `dtype`.
  /// With reduction='none', this gradient is the token weights. An undefined return value means a gradient of
  /// 1.
  Tensor factor(at::ScalarType dtype) const;
  bool scalar;
  // whether the operator also returns the tokens' losses, so that the result must not share their memory
  bool copies;
};

/// Converts upstream gradients if the class weights are divided by Reduction::share. The gradient of a
/// token's loss with the caller's class weights becomes two gradients: of the loss with the divided weights,
/// and of the lse. `slope` is Reduction::slope_of_z().
std::vector<Tensor> balanced_upstream(std::vector<Tensor> upstream, const Tensor& share, const Tensor& slope,
                                      double z_loss);

/// Returns the upstream gradients of each token's loss, lse and entropy. `upstream` holds the gradients of
/// the operator's outputs: the result and, with stats, the tokens' loss, lse and entropy. `factor` is
/// Reduction::factor(). An undefined tensor means no gradient.
std::array<Tensor, 3> upstream_of_tokens(const std::vector<Tensor>& upstream, const Tensor& factor,
                                         at::ScalarType compute);

}  // namespace shoestring::losses

namespace shoestring::losses {

using at::Tensor;

constexpr const char* kCrossEntropyOp = "cross_entropy";

/// The memory layout of the rows of logits: row r begins (r / inner) * outer_stride + (r % inner) *
/// inner_stride elements after the first row.
struct LogitsLayout {
  int64_t outer = 1, outer_stride = 0, inner = 1, inner_stride = 0;
  int64_t operator()(int64_t r) const { return r / inner * outer_stride + r % inner * inner_stride; }
};

/// Returns the layout of the logits. Returns nullopt if the classes of a row are not contiguous, or if the
/// dimensions of the tokens need more than two strides.
std::optional<LogitsLayout> layout_of(const Tensor& logits);
/// Returns whether the rows of the logits have a LogitsLayout and do not overlap, so that a gradient can
/// overwrite them.
bool writable(const Tensor& logits);

/// Visits the first arguments of the operators of cross_entropy. kInPlace: of those that may overwrite the
/// logits, whose names end in _.
template <bool kInPlace, class Self, class Visitor>
void visit_logits(Self& logits, Self& target, Visitor& visit) {
  if constexpr (kInPlace) {
    visit.changed("logits", logits);
  } else {
    visit("logits", logits);
  }
  visit("target", target);
  visit.keywords();
}

/// The arguments of _cross_entropy_rows and, with kInPlace, of _cross_entropy_rows_.
template <bool kInPlace>
struct CrossEntropyRowsCall : RowsCall {
  bool gradient = kInPlace;  // whether the gradient of the logits is requested

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit_logits<kInPlace>(self.input, self.target, visit);
    visit_token_loss(self.options, visit);
    upstream(self, visit);
    visit("stats", self.stats);
    if constexpr (!kInPlace) visit("gradient", self.gradient);
  }
};

/// The checked arguments of _cross_entropy_rows or _cross_entropy_rows_.
struct CrossEntropyProblem : RowsProblem {
  explicit CrossEntropyProblem(const RowsCall& call);

  Tensor logits;    // (..., vocab)
  Tensor gradient;  // gradient of the logits, in their shape and dtype; undefined if not requested
  LogitsLayout layout, gradient_layout;
};

/// Boxed kernels of the operators _cross_entropy_rows and _cross_entropy_rows_. The argument `run` is the
/// function that computes all rows on the CPU or on CUDA.
using CrossEntropyRun = RowsResult (*)(const CrossEntropyProblem&);
void run_cross_entropy_rows(torch::jit::Stack* stack, CrossEntropyRun run);
void run_cross_entropy_rows_in_place(torch::jit::Stack* stack, CrossEntropyRun run);
template <CrossEntropyRun run>
void boxed_cross_entropy_rows(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  run_cross_entropy_rows(stack, run);
}
template <CrossEntropyRun run>
void boxed_cross_entropy_rows_in_place(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  run_cross_entropy_rows_in_place(stack, run);
}

/// The arguments of cross_entropy as its callers pass them.
template <class Options, bool kInPlace = false>
struct CrossEntropyArguments {
  Tensor logits, target;
  Options options;

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit_logits<kInPlace>(self.logits, self.target, visit);
    visit_token_loss(self.options, visit);
    visit_reduction(self.options, visit);
    visit("dim", self.options.dim());
  }
};

/// The options that both operators have, and the dimension of the classes, which only cross_entropy has.
struct LogitsOptions : LinearCrossEntropyOptions {
  TORCH_ARG(int64_t, dim) = -1;
};

/// One call of cross_entropy. The classes are the last dimension of `input`.
struct CrossEntropyCall : TokenCall {
  CrossEntropyCall() = default;
  CrossEntropyCall(const torch::jit::Stack& stack, bool stats);

  /// Copies the logits if kernels cannot read their rows, so that they are copied once in forward and not
  /// again in backward. The copy has no other owner, so its gradient may overwrite it. Graphs of
  /// torch.compile copy in the operators.
  void make_readable();
};

/// Calls _cross_entropy_rows or, for kInPlace, _cross_entropy_rows_ through the dispatcher. `upstream` holds
/// the gradients of each token's loss, lse and entropy; an undefined tensor means no gradient.
enum class LogitsGradient { kNone, kNew, kInPlace };
struct CrossEntropyResult : RowsResult {
  Tensor gradient;  // gradient of the logits; undefined unless LogitsGradient::kNew was requested

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    RowsResult::fields(self, visit);
    visit("grad_logits", self.gradient);
  }
};
CrossEntropyResult cross_entropy_rows(const CrossEntropyCall& call, const std::array<Tensor, 3>& upstream,
                                      LogitsGradient gradient);
inline void keep_hardest(CrossEntropyCall& call) {
  keep_hardest(call, [&] { return cross_entropy_rows(call, {}, LogitsGradient::kNone).loss; });
}

}  // namespace shoestring::losses
