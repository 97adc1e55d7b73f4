#pragma once

// Shared declarations of the CPU, CUDA and autograd implementations of cross_entropy.

#include <array>
#include <optional>
#include <utility>

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "losses/token_loss.h"

namespace shoestring::losses {

constexpr const char* kCrossEntropyOp = "cross_entropy";

/// Returns the layout of the rows of logits. Returns nullopt if the classes of a row are not contiguous, or
/// if the dimensions of the tokens need more than two strides.
std::optional<kernels::CrossEntropyLayout> layout_of(const Tensor& logits);
/// Returns whether the rows of the logits have a layout and do not overlap, so that a gradient can overwrite
/// them.
bool writable(const Tensor& logits);

/// Lists the arguments of cross_entropy. cross_entropy_ has the same, but may change the logits.
template <class T, class Options, class Dim, class Visitor>
void visit_cross_entropy(T& logits, T& target, Options& options, Dim& dim, Visitor& visit) {
  visit("logits", logits);
  visit("target", target);
  visit.keywords();
  visit_token_loss(options, visit);
  visit_reduction(options, visit);
  visit("dim", dim);
}

struct CrossEntropyResult : RowsResult {
  Tensor gradient;  // gradient of the logits; undefined if it is not requested, or has replaced the logits

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    RowsResult::fields(self, visit);
    visit("grad_logits", self.gradient);
  }
  void fill(const Tensor& like);
};

/// The gradient that a call of the operators for the rows computes.
enum class LogitsGradient { kNone, kNew, kInPlace };

/// A call of cross_entropy, or of an operator that computes its rows. The classes are the last dimension of
/// `input`.
struct CrossEntropyProblem : TokenProblem {
  CrossEntropyProblem() : TokenProblem(kCrossEntropyOp, "logits", "vocab") {}

  int64_t dim = -1;  // the dimension of the classes in the caller's logits
  // For the rows: whether the gradient overwrites the logits, or is a new tensor; the gradient, in the shape
  // and dtype of the logits, undefined if not requested; the layouts of both.
  bool in_place = false, wants_gradient = false;
  Tensor gradient;
  kernels::CrossEntropyLayout layout{}, gradient_layout{};

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit_cross_entropy(self.input, self.target, self.options, self.dim, visit);
  }
  /// Reads and checks the arguments of one of the four operators.
  static CrossEntropyProblem read(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  /// Copies the logits if kernels cannot read their rows, so that they are copied once in forward and not
  /// again in backward. The copy has no other owner, so its gradient may overwrite it. Graphs of
  /// torch.compile copy in the operators.
  void make_readable();
  /// Calls _cross_entropy_rows or, for kInPlace, _cross_entropy_rows_ through the dispatcher. `upstream`
  /// holds the gradients of each token's loss, lse and entropy; an undefined tensor means no gradient.
  CrossEntropyResult rows(const std::array<Tensor, 3>& upstream, LogitsGradient gradient) const;
  RowsResult losses() const { return rows({}, LogitsGradient::kNone); }
  /// Checks the arguments of the rows.
  void check_rows();
  /// Finds the memory of logits and gradient for the kernels that compute the rows.
  void place();
};

/// The same as arguments of _cross_entropy_rows and, with kInPlace, of _cross_entropy_rows_, which writes the
/// gradient into the logits.
template <bool kInPlace>
struct CrossEntropyRowsArguments : CrossEntropyProblem {
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    if constexpr (kInPlace) {
      visit.changed("logits", self.input);
    } else {
      visit("logits", self.input);
    }
    visit("target", self.target);
    visit.keywords();
    visit_token_loss(self.options, visit);
    visit_upstream(self, visit);
    visit("stats", self.stats);
    if constexpr (!kInPlace) visit("gradient", self.wants_gradient);
  }
  void check() {
    in_place = kInPlace;
    check_rows();
  }
};

/// Returns the results of an operator. The function RowsResult run(CrossEntropyProblem&) computes all rows.
template <auto run, bool kInPlace>
auto results_of_rows(CrossEntropyRowsArguments<kInPlace>& p) {
  RowsResult r = run(p);
  if constexpr (kInPlace) {
    return r;
  } else {
    return CrossEntropyResult{std::move(r), p.gradient};
  }
}
/// Registers `run` as kernel of both operators.
template <auto run>
void register_cross_entropy_rows(torch::Library& m) {
  m.impl("_cross_entropy_rows",
         torch::CppFunction::makeFromBoxedFunction<
             &boxed_rows<CrossEntropyRowsArguments<false>, results_of_rows<run, false>>>());
  m.impl("_cross_entropy_rows_",
         torch::CppFunction::makeFromBoxedFunction<
             &boxed_rows<CrossEntropyRowsArguments<true>, results_of_rows<run, true>>>());
}

}  // namespace shoestring::losses
