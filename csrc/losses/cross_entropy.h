#pragma once

// Shared declarations of cross_entropy and linear_cross_entropy, and then those of cross_entropy alone.

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

/// Argument checks. check_tokens() compares the shapes of target and `input`, (..., `last`), and their
/// dtypes. check_weights() expects a floating tensor of the given shape, with one weight per class or token.
void check_tokens(const char* op, const char* name, const char* last, const Tensor& input,
                  const Tensor& target);
void check_weights(const char* op, const char* name, const OptionalTensor& weights, c10::SymIntArrayRef shape,
                   const Tensor& input);
double finite(const char* op, const BoxedArguments& arguments, const char* name, const char* expected,
              bool (*holds)(double));

/// The arguments of the `*_rows` operators, which compute a loss for each row of logits. They are checked,
/// except for the values of the targets.
struct RowsProblem {
  RowsProblem(const char* op, const BoxedArguments& arguments, const Tensor& input, c10::SymInt vocab);

  const char* op;
  Tensor target;
  OptionalTensor class_weights;
  OptionalTensor grad_loss, grad_lse, grad_entropy;  // shape () or target's shape
  int64_t ignore_index;
  double label_smoothing, softcap, logit_scale, z_loss;
  bool stats;
  c10::SymInt classes;
};

/// The results for each row of logits.
struct RowsResult {
  Tensor loss, lse;        // target's shape, compute dtype
  Tensor entropy, argmax;  // undefined if not requested
};

/// The arguments of one call of a cross-entropy operator, with or without stats.
struct TokenCall {
  TokenCall() = default;
  TokenCall(const char* op, const BoxedArguments& arguments, const Tensor& input, c10::SymInt vocab,
            bool stats);

  Tensor input, target;  // (..., features) or (..., vocab); (...), already shifted
  c10::SymInt classes;
  OptionalTensor class_weights, token_weights;
  std::string reduction;
  double hard_fraction = 1;
  // The options that the `*_rows` operators have as well. The first one is ignore_index.
  NamedArguments options;
  bool stats = false;

  int64_t ignore_index() const { return options[0].second.toInt(); }
  double z_loss() const;
};

/// Keeps the tokens with the largest `losses()`, which take an extra pass, and ignores all others. Does
/// nothing if hard_fraction is 1.
void keep_largest(TokenCall& call, Tensor loss);
template <class Losses>
void keep_hardest(TokenCall& call, Losses losses) {
  if (call.hard_fraction == 1 || call.target.sym_numel() == 0) return;
  const bool stats = std::exchange(call.stats, false);
  Tensor loss = losses();
  call.stats = stats;
  keep_largest(call, std::move(loss));
}

/// Turns the losses of the tokens into the result, sum(weights * loss) / total. Undefined `weights` are all
/// 1; an undefined `total` is 1.
///
/// A mean divides the cross-entropies by the sum of the targets' class weights. The z terms have no class
/// weights. They are divided by the number of tokens (or by the sum of the token weights), as in Liger
/// Kernel. `share` is the quotient of the first sum and the second. Class weights divided by `share` give
/// both terms the same divisor, which is the second sum.
struct Reduction {
  explicit Reduction(const TokenCall& call);

  Tensor weights;  // weight of each token's loss, shape (...)
  Tensor total;    // divisor of a mean, shape (), fp64
  // Quotient of the two sums, shape (), fp64. Undefined if it is 1, or if the result is no mean with z terms.
  Tensor share;
  double z_loss = 0;  // 0 unless `share` is defined

  /// Divides the call's class weights by `share`. The losses of the rows are then what apply() expects.
  void balance(TokenCall& call) const;
  /// Convert the tokens' losses: balanced() from the caller's class weights to the balanced ones, original()
  /// back.
  Tensor balanced(const Tensor& loss, const Tensor& lse) const;
  Tensor original(const Tensor& loss, const Tensor& lse) const;
  /// Returns the result, from the tokens' losses.
  Tensor apply(const Tensor& loss) const;
  /// Returns the gradient of a scalar result with respect to the tokens' losses: () or (...), of `dtype`.
  Tensor factor(at::ScalarType dtype) const;
  bool scalar;
  bool copies;  // whether the tokens' losses are also returned
};

/// Converts upstream gradients if class weights are balanced. The gradient of a token's original loss becomes
/// a gradient of its balanced loss and one of its lse.
std::vector<Tensor> balanced_upstream(std::vector<Tensor> upstream, const Tensor& share, const Tensor& lse,
                                      double z_loss);

/// Returns the gradients of the result with respect to the tokens' loss, lse and entropy, from the gradients
/// of an operator's outputs. Undefined means no gradient.
std::array<Tensor, 3> upstream_of_tokens(const std::vector<Tensor>& upstream, const Tensor& factor,
                                         at::ScalarType compute);

}  // namespace shoestring::losses

namespace shoestring::losses {

using at::Tensor;

constexpr const char* kCrossEntropyOp = "cross_entropy";

/// The memory layout of the rows of logits: row r is at (r / inner) * outer_stride + (r % inner) *
/// inner_stride elements.
struct LogitsLayout {
  int64_t outer = 1, outer_stride = 0, inner = 1, inner_stride = 0;
  int64_t operator()(int64_t r) const { return r / inner * outer_stride + r % inner * inner_stride; }
};

/// Returns the layout of the logits, or nullopt if the classes of a row are not contiguous or the tokens need
/// more than two strides.
std::optional<LogitsLayout> layout_of(const Tensor& logits);
/// Returns whether the logits have a layout without overlap, so that a gradient can overwrite them.
bool writable(const Tensor& logits);

/// The arguments of cross_entropy_rows.
struct CrossEntropyProblem : RowsProblem {
  explicit CrossEntropyProblem(const BoxedArguments& arguments);

  Tensor logits;    // (..., vocab)
  Tensor gradient;  // like logits; undefined if not requested
  LogitsLayout layout, gradient_layout;
};

/// Implement a device's cross_entropy_rows and cross_entropy_rows_ as boxed kernels.
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

/// The arguments of one call of cross_entropy.
struct CrossEntropyCall : TokenCall {
  using TokenCall::TokenCall;
  CrossEntropyCall(const BoxedArguments& arguments, bool stats);
};
constexpr const char* kCrossEntropyOptions[] = {"ignore_index", "label_smoothing", "softcap", "logit_scale",
                                                "z_loss"};

/// Calls cross_entropy_rows or cross_entropy_rows_ through the dispatcher. `upstream` holds the gradients of
/// loss, lse and entropy; an undefined tensor means no gradient.
enum class LogitsGradient { kNone, kNew, kInPlace };
struct CrossEntropyResult : RowsResult {
  Tensor gradient;  // set for kNew
};
CrossEntropyResult cross_entropy_rows(const CrossEntropyCall& call, const std::array<Tensor, 3>& upstream,
                                      LogitsGradient gradient);
inline void keep_hardest(CrossEntropyCall& call) {
  keep_hardest(call, [&] { return cross_entropy_rows(call, {}, LogitsGradient::kNone).loss; });
}

}  // namespace shoestring::losses
