#pragma once

// What the cross-entropies of logits and of a linear layer share, then what belongs to that of logits alone.

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/call.h"

namespace shoestring::losses {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

/// What the operators' arguments are checked for: target beside `input`, (..., `last`); a tensor for each
/// class or token.
void check_tokens(const char* op, const char* name, const char* last, const Tensor& input,
                  const Tensor& target);
void check_weights(const char* op, const char* name, const OptionalTensor& weights, c10::SymIntArrayRef shape,
                   const Tensor& input);
double finite(const char* op, const BoxedArguments& arguments, const char* name, const char* expected,
              bool (*holds)(double));

/// What rows of logits are reduced by: the arguments that `.._rows` operators have, checked but for what the
/// targets hold.
struct RowsProblem {
  RowsProblem(const char* op, const BoxedArguments& arguments, const Tensor& input, c10::SymInt vocab);

  const char* op;
  Tensor target;
  OptionalTensor class_weights;
  OptionalTensor grad_loss, grad_lse, grad_entropy;  // () or target's shape
  int64_t ignore_index;
  double label_smoothing, softcap, logit_scale, z_loss;
  bool stats;
  c10::SymInt classes;
};

struct RowsResult {
  Tensor loss, lse;        // target's shape, compute type
  Tensor entropy, argmax;  // undefined where not wanted
};

/// A call of an operator, with stats or without.
struct TokenCall {
  TokenCall() = default;
  TokenCall(const char* op, const BoxedArguments& arguments, const Tensor& input, c10::SymInt vocab,
            bool stats);

  Tensor input, target;  // (..., features or vocab), (...): shifted
  c10::SymInt classes;
  OptionalTensor class_weights, token_weights;
  std::string reduction;
  double hard_fraction = 1;
  NamedArguments options;  // those that the rows have as well; the first is ignore_index
  bool stats = false;

  int64_t ignore_index() const { return options[0].second.toInt(); }
  double z_loss() const;
};

/// The call on the tokens of the largest of `losses()`, a pass of its own; the others are ignored. Nothing
/// else, where hard_fraction is 1.
void keep_largest(TokenCall& call, Tensor loss);
template <class Losses>
void keep_hardest(TokenCall& call, Losses losses) {
  if (call.hard_fraction == 1 || call.target.sym_numel() == 0) return;
  const bool stats = std::exchange(call.stats, false);
  Tensor loss = losses();
  call.stats = stats;
  keep_largest(call, std::move(loss));
}

/// How the losses of tokens become a result: sum(weights loss) / total. Undefined: weights of one, and no
/// total.
///
/// A mean divides the cross-entropies by the sum of the targets' class weights, and the z terms, which have
/// no class weight, by the number of tokens (or the sum of their weights), as Liger Kernel does. With
/// `share`, the quotient of the two sums, class weights divided by share give both the same divisor: the
/// second sum.
struct Reduction {
  explicit Reduction(const TokenCall& call);

  Tensor weights;     // (...)
  Tensor total;       // (), fp64
  Tensor share;       // (), fp64; undefined: 1, or no mean with z terms
  double z_loss = 0;  // where share is defined

  /// Divides the call's class weights by share. The rows' losses are then what apply() takes.
  void balance(TokenCall& call) const;
  /// The losses of tokens under balanced class weights, from those under the caller's, and the reverse.
  Tensor balanced(const Tensor& loss, const Tensor& lse) const;
  Tensor original(const Tensor& loss, const Tensor& lse) const;
  Tensor apply(const Tensor& loss) const;
  /// What a scalar result's gradient by the tokens' losses is: () or (...), of `dtype`.
  Tensor factor(at::ScalarType dtype) const;
  bool scalar;
  bool copies;  // the losses of tokens are a result besides
};

/// The upstream gradients of an operator whose class weights are balanced: the gradient of a token's original
/// loss becomes one of its balanced loss and one of its lse.
std::vector<Tensor> balanced_upstream(std::vector<Tensor> upstream, const Tensor& share, const Tensor& lse,
                                      double z_loss);

/// A result's gradients by the tokens' loss, lse and entropy, from those of an operator's outputs. Undefined:
/// none.
std::array<Tensor, 3> upstream_of_tokens(const std::vector<Tensor>& upstream, const Tensor& factor,
                                         at::ScalarType compute);

}  // namespace shoestring::losses

namespace shoestring::losses {

using at::Tensor;

constexpr const char* kCrossEntropyOp = "cross_entropy";

/// Where rows of logits lie: row r at (r / inner) * outer_stride + (r % inner) * inner_stride elements.
struct LogitsLayout {
  int64_t outer = 1, outer_stride = 0, inner = 1, inner_stride = 0;
  int64_t operator()(int64_t r) const { return r / inner * outer_stride + r % inner * inner_stride; }
};

/// None where classes do not lie side by side, or tokens take more than two strides.
std::optional<LogitsLayout> layout_of(const Tensor& logits);
/// Whether the logits have a layout in which no two share memory, so that a gradient may take their place.
bool writable(const Tensor& logits);

/// The arguments of cross_entropy_rows.
struct CrossEntropyProblem : RowsProblem {
  explicit CrossEntropyProblem(const BoxedArguments& arguments);

  Tensor logits;    // (..., vocab)
  Tensor gradient;  // like logits; undefined: not wanted
  LogitsLayout layout, gradient_layout;
};

/// Registers a device's cross_entropy_rows and cross_entropy_rows_.
using CrossEntropyRun = RowsResult (*)(const CrossEntropyProblem&);
void run_cross_entropy_rows(const c10::OperatorHandle& op, torch::jit::Stack* stack, CrossEntropyRun run);
void run_cross_entropy_rows_in_place(const c10::OperatorHandle& op, torch::jit::Stack* stack,
                                     CrossEntropyRun run);
template <CrossEntropyRun run>
void boxed_cross_entropy_rows(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_cross_entropy_rows(op, stack, run);
}
template <CrossEntropyRun run>
void boxed_cross_entropy_rows_in_place(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_cross_entropy_rows_in_place(op, stack, run);
}

struct CrossEntropyCall : TokenCall {
  using TokenCall::TokenCall;
  CrossEntropyCall(const BoxedArguments& arguments, bool stats);
};
constexpr const char* kCrossEntropyOptions[] = {"ignore_index", "label_smoothing", "softcap", "logit_scale",
                                                "z_loss"};

/// The rows through the dispatcher. `upstream`, of loss, lse and entropy: undefined tensors for those that
/// there are none of.
enum class LogitsGradient { kNone, kNew, kInPlace };
struct CrossEntropyResult : RowsResult {
  Tensor gradient;  // for kNew
};
CrossEntropyResult cross_entropy_rows(const CrossEntropyCall& call, const std::array<Tensor, 3>& upstream,
                                      LogitsGradient gradient);
inline void keep_hardest(CrossEntropyCall& call) {
  keep_hardest(call, [&] { return cross_entropy_rows(call, {}, LogitsGradient::kNone).loss; });
}

}  // namespace shoestring::losses
