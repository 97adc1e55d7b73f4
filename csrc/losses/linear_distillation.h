#pragma once

// Shared declarations of the CPU, CUDA and autograd implementations of linear_distillation.

#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include <shoestring/ops.h>

#include "core/arguments.h"
#include "losses/head.h"
#include "losses/linear_distillation_table.h"

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
};

/// The tensors of student and teacher, and the options, of linear_distillation and _linear_distillation_rows.
struct DistillationHeads {
  Tensor hidden, weight, teacher_hidden, teacher_weight;
  OptionalTensor bias, teacher_bias;
  LinearDistillationOptions options;

  template <class Self, class Visitor>
  static void heads(Self& self, Visitor& visit) {
    visit("hidden", self.hidden);
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
  Head student() const { return {hidden, weight, bias, options}; }
  Head teacher() const;
  /// Checks that the heads and the target match.
  void check() const;
};

/// The arguments of one call of linear_distillation.
struct DistillationCall : DistillationHeads {
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    heads(self, visit);
    visit("reduction", self.options.reduction());
  }

  /// Reads and checks the arguments of the operator.
  static DistillationCall read(const torch::jit::Stack& stack);
  bool scalar() const { return options.reduction() != "none"; }
  Mask require_grad() const {
    return losses::require_grad(hidden, weight, bias, options.lora_hidden(), options.lora_B());
  }
  /// Returns the number of tokens that are not ignored, as a tensor of shape (), fp64.
  Tensor count() const;
  /// Reduces the tokens' losses to their mean or sum. With reduction='none' it returns them unchanged.
  Tensor reduce(const Tensor& loss) const;
};

/// The arguments of _linear_distillation_rows.
struct DistillationRowsCall : DistillationHeads {
  OptionalTensor grad_loss;
  bool averaged = false;
  Mask mask{};

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    heads(self, visit);
    visit("grad_loss", self.grad_loss);
    visit("averaged", self.averaged);
    visit("output_mask", self.mask);
  }
};

/// The arguments of _linear_distillation_rows, checked by the constructor. The base class Head is the
/// student's output layer.
struct DistillationProblem : Head {
  explicit DistillationProblem(const DistillationRowsCall& call);

  bool wants_gradient() const { return any(mask); }

  Head teacher;
  OptionalTensor target;     // target classes, shape (tokens)
  OptionalTensor grad_loss;  // upstream gradient of the loss, shape () or (tokens)
  int64_t ignore_index;
  kernels::Divergence divergence;
  double beta, temperature;
  bool averaged;
  int64_t workspace_mb;
  Mask mask;
};

/// Boxed kernel of the operator _linear_distillation_rows. The argument `run` is the function that computes
/// all rows on the CPU or on CUDA.
using DistillationRun = DistillationResult (*)(const DistillationProblem&);
void run_distillation_rows(torch::jit::Stack* stack, DistillationRun run);
template <DistillationRun run>
void boxed_distillation_rows(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  run_distillation_rows(stack, run);
}

/// Calls _linear_distillation_rows through the dispatcher. Returns the losses in the shape of the tokens, and
/// the gradients in the shapes of their inputs. `upstream` is the gradient of the tokens' losses: a scalar
/// for all tokens, or one number per token. It is undefined if no gradients are requested.
DistillationResult distillation_rows(const DistillationCall& call, const Tensor& upstream, const Mask& mask);

}  // namespace shoestring::losses
