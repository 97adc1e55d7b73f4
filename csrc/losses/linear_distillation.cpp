#include "losses/linear_distillation.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <shoestring/losses/ops.h>
#include <torch/library.h>

#include <cmath>

#include "core/autograd.h"
#include "core/device.h"
#include "core/tensors.h"
#include "losses/head_autograd.h"

namespace shoestring::losses {
namespace {

kernels::Divergence divergence_of(const std::string& name) {
  if (name == "forward_kl") return kernels::Divergence::kForwardKl;
  if (name == "reverse_kl") return kernels::Divergence::kReverseKl;
  TORCH_CHECK(name == "jsd", kDistillationOp,
              ": divergence: expected 'forward_kl', 'reverse_kl' or 'jsd', received '", name, "'");
  return kernels::Divergence::kJsd;
}

}  // namespace

Head DistillationProblem::teacher() const {
  Head head;
  head.hidden = teacher_hidden;
  head.weight = teacher_weight;
  head.bias = teacher_bias;
  head.absmax = options.teacher_absmax();
  head.nested = options.teacher_nested();
  head.quant_type = options.teacher_quant_type();
  head.block_size = options.teacher_block_size();
  head.prefix = "teacher_";
  head.vocab = vocab_of(input, weight, options.absmax().has_value());
  return head;
}

Head DistillationProblem::check_heads() const {
  Head of_student(*this);
  const Head of_teacher = teacher();
  of_student.check(kDistillationOp);
  TORCH_CHECK(teacher_hidden.dim() == input.dim() && of_teacher.tokens() == of_student.tokens(),
              kDistillationOp, ": teacher_hidden: expected hidden's shape except for the last dimension, ",
              input.sym_sizes(), ", received ", teacher_hidden.sym_sizes());
  TORCH_CHECK(is_supported_float(teacher_hidden.scalar_type()) && teacher_hidden.device() == input.device() &&
                  compute_type(teacher_hidden) == compute_type(input),
              kDistillationOp, ": teacher_hidden: expected ",
              input.scalar_type() == at::kDouble ? "fp64" : "fp32, bf16 or fp16", " on ", input.device(),
              ", to match hidden's dtype, received ", teacher_hidden.scalar_type(), " on ",
              teacher_hidden.device());
  of_teacher.check(kDistillationOp);
  if (options.target()) check_target(kDistillationOp, of_student, *options.target());
  return of_student;
}

void DistillationRowsArguments::check() {
  const double beta = options.beta(), temperature = options.temperature();
  divergence = divergence_of(options.divergence());
  const Head head = check_heads();
  vocab = head.vocab;
  head.check_mask(kDistillationOp, mask);
  TORCH_CHECK(input.dim() == 2, kDistillationOp,
              "_rows: hidden: expected shape (tokens, features), received ", input.sym_sizes());
  TORCH_CHECK(std::isfinite(temperature) && temperature > 0, kDistillationOp,
              ": temperature: expected a positive number, received ", temperature);
  TORCH_CHECK(divergence != kernels::Divergence::kJsd || (beta > 0 && beta < 1), kDistillationOp,
              ": beta: expected a number in (0, 1), received ", beta,
              "; for the limits 0 and 1 use divergence='forward_kl' or 'reverse_kl'");
  check_factor(kDistillationOp, "grad_loss", head, grad_loss);
  TORCH_CHECK(grad_loss || !wants_gradient(), kDistillationOp,
              ": grad_loss: expected one with gradients, received None");
  check_workspace(kDistillationOp, options.workspace_mb());
}

Reduction DistillationProblem::take_reduction() const {
  Reduction reduction(options.reduction() != "none", Tensor());
  if (options.reduction() != "mean") return reduction;
  const Tensor counted = options.target() ? options.target()->ne(options.ignore_index())
                                          : at::ones_symint(input.sym_sizes().slice(0, input.dim() - 1),
                                                            input.options().dtype(at::kByte));
  reduction.total = counted.sum(at::kDouble);
  return reduction;
}

DistillationResult DistillationProblem::rows(const std::array<Tensor, 3>& upstream, const Mask& mask) const {
  DistillationRowsArguments flattened{*this};
  LinearDistillationOptions& o = flattened.options;
  flattened.input = flat_rows(input);
  flattened.teacher_hidden = flat_rows(teacher_hidden);
  o.lora_hidden(flat_rows(o.lora_hidden()));
  if (o.target()) o.target(flat(input, *o.target()));
  flattened.grad_loss = as_optional(flat(input, upstream[0]));
  flattened.averaged = o.reduction() == "mean";
  if (flattened.grad_loss) flattened.mask = mask;
  static const Operator<DistillationRowsArguments, DistillationResult> op(
      "shoestring::_linear_distillation_rows");
  DistillationResult r = op(flattened);
  r.loss = r.loss.view_symint(input.sym_sizes().slice(0, input.dim() - 1));
  view_gradients(r.gradients, flattened.mask, input, options.lora_hidden());
  return r;
}

namespace {

DistillationResult distillation_rows_meta(const DistillationProblem& p) {
  return {at::empty_symint(p.input.sym_sizes().slice(0, 1), p.input.options().dtype(compute_type(p.input))),
          empty_gradients(inputs_of(p), p.mask)};
}

// Implements linear_distillation for calls that need no gradient. One implementation serves every device.
void distillation_without_gradients(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const auto p = read_fields<DistillationProblem>(*stack);
  p.check_heads();
  check_reduction(kDistillationOp, p.options.reduction());
  replace_arguments<DistillationProblem>(stack, p.results(p.take_reduction(), p.rows({}, {})));
}

void distillation_autograd(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto p = read_fields<DistillationProblem>(*stack);
  if (!at::GradMode::is_enabled() || !any(require_grad(inputs_of(p)))) {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
    return;
  }
  p.check_heads();
  check_reduction(kDistillationOp, p.options.reduction());
  replace_arguments<DistillationProblem>(stack, HeadLoss<DistillationProblem>::record(p));
}

// Under autocast, both heads' hidden, weight and bias are cast to the autocast dtype, as for a linear layer.
// The loss is fp32 with every autocast dtype.
template <c10::DeviceType device>
void distillation_autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  call_autocast(op, stack, device,
                {"hidden", "weight", "teacher_hidden", "teacher_weight", "bias", "teacher_bias"});
}

TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("_linear_distillation_rows", torch::CppFunction::makeFromBoxedFunction<
                                          &boxed_rows<DistillationRowsArguments, distillation_rows_meta>>());
}
TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  m.impl("linear_distillation", torch::CppFunction::makeFromBoxedFunction<&distillation_without_gradients>());
}
TORCH_LIBRARY_IMPL(shoestring, Autograd, m) {
  m.impl("linear_distillation", torch::CppFunction::makeFromBoxedFunction<&distillation_autograd>());
}
const AutocastRules distillation_rules([](torch::Library& m, auto device) {
  m.impl("linear_distillation", torch::CppFunction::makeFromBoxedFunction<&distillation_autocast<device>>());
});

}  // namespace

}  // namespace shoestring::losses

namespace shoestring {

using at::Tensor;

Tensor linear_distillation(const Tensor& hidden, const Tensor& weight, const Tensor& teacher_hidden,
                           const Tensor& teacher_weight, const std::optional<Tensor>& bias,
                           const std::optional<Tensor>& teacher_bias, const LinearDistillationOptions& o) {
  static const Operator<losses::DistillationProblem, TensorResult> op("shoestring::linear_distillation");
  return op({hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias, o, {}}).tensor;
}

}  // namespace shoestring
