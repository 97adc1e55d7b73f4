#pragma once

// Shared declarations of the CPU, CUDA and autograd implementations of linear_distillation.

#include <array>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <shoestring/losses/ops.h>

#include "losses/head.h"
#include "losses/linear_distillation_table.h"
#include "losses/token_loss.h"

namespace shoestring::losses {

constexpr const char* kDistillationOp = "linear_distillation";

struct DistillationResult {
  Tensor loss;  // loss of each token, shape (tokens), fp32 or fp64
  Gradients gradients;

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit("loss", self.loss);
    visit_gradients(self.gradients, visit);
  }
  void fill(const Tensor& like) { fill_gradients(gradients, like); }
};

/// A call of linear_distillation, or of the operator that computes its rows. The member `input` holds the
/// argument `hidden`.
struct DistillationProblem {
  static constexpr const char* kOp = kDistillationOp;

  Tensor input, weight, teacher_hidden, teacher_weight;
  OptionalTensor bias, teacher_bias;
  LinearDistillationOptions options;
  // For the rows: the upstream gradient of the losses, shape () or (tokens), whether it is about 1 / tokens,
  // and the requested gradients.
  OptionalTensor grad_loss;
  bool averaged = false;
  Mask mask{};
  // For the rows, from check_rows().
  kernels::Divergence divergence{};
  c10::SymInt vocab = 0;

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit_rows(self, visit);
    visit("reduction", self.options.reduction());
  }
  /// Lists the arguments that the operator for the rows has, too.
  template <class Self, class Visitor>
  static void visit_rows(Self& self, Visitor& visit) {
    visit("hidden", self.input);
    visit("weight", self.weight);
    visit("teacher_hidden", self.teacher_hidden);
    visit("teacher_weight", self.teacher_weight);
    visit("bias", self.bias);
    visit("teacher_bias", self.teacher_bias);
    visit.keywords();
    visit_head(self.options, visit);
    visit("teacher_absmax", self.options.teacher_absmax());
    visit("teacher_nested", self.options.teacher_nested());
    visit("teacher_quant_type", self.options.teacher_quant_type());
    visit("teacher_block_size", self.options.teacher_block_size());
    visit("target", self.options.target());
    visit("ignore_index", self.options.ignore_index());
    visit("divergence", self.options.divergence());
    visit("beta", self.options.beta());
    visit("temperature", self.options.temperature());
    visit("workspace_mb", self.options.workspace_mb());
  }
  /// Returns the output layer of the teacher.
  Head teacher() const;
  /// Checks that the heads and the target match, and returns the head of the student.
  Head check_heads() const;
  bool wants_gradient() const { return any(mask); }

  // linear_distillation has neither of these options.
  static OptionalTensor weight_grad() { return {}; }
  static std::optional<double> upstream_grad() { return {}; }
  /// Returns the mean over the tokens that are not ignored, the sum or no reduction.
  Reduction take_reduction() const;
  /// Calls _linear_distillation_rows through the dispatcher. Returns the losses in the shape of the tokens,
  /// and the gradients in the shapes of their inputs. upstream[0] is the gradient of the tokens' losses: a
  /// scalar for all tokens, or one number per token. It is undefined if no gradients are requested.
  DistillationResult rows(const std::array<Tensor, 3>& upstream, const Mask& mask) const;
  static std::vector<Tensor> results(const Reduction& reduction, const DistillationResult& rows) {
    return {reduction.apply(rows.loss)};
  }
};

/// The same as arguments of _linear_distillation_rows.
struct DistillationRowsArguments : DistillationProblem {
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit_rows(self, visit);
    visit("grad_loss", self.grad_loss);
    visit("averaged", self.averaged);
    visit("output_mask", self.mask);
  }
  void check();
};

}  // namespace shoestring::losses
