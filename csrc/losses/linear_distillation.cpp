#include "losses/linear_distillation.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <shoestring/ops.h>
#include <torch/library.h>

#include <cmath>

#include "core/autograd.h"
#include "core/tensors.h"

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

Head DistillationHeads::teacher() const {
  Head head;
  head.hidden = teacher_hidden;
  head.weight = teacher_weight;
  head.bias = teacher_bias;
  head.absmax = options.teacher_absmax();
  head.nested = options.teacher_nested();
  head.quant_type = options.teacher_quant_type();
  head.block_size = options.teacher_block_size();
  head.prefix = "teacher_";
  head.vocab = vocab_of(hidden, weight, options.absmax().has_value());
  return head;
}

void DistillationHeads::check() const {
  const Head of_student = student(), of_teacher = teacher();
  of_student.check(kDistillationOp);
  TORCH_CHECK(teacher_hidden.dim() == hidden.dim() && of_teacher.tokens() == of_student.tokens(),
              kDistillationOp, ": teacher_hidden: expected hidden's shape except for the last dimension, ",
              hidden.sym_sizes(), ", received ", teacher_hidden.sym_sizes());
  TORCH_CHECK(
      is_supported_float(teacher_hidden.scalar_type()) && teacher_hidden.device() == hidden.device() &&
          compute_type(teacher_hidden) == compute_type(hidden),
      kDistillationOp, ": teacher_hidden: expected ",
      hidden.scalar_type() == at::kDouble ? "fp64" : "fp32, bf16 or fp16", " on ", hidden.device(),
      ", to match hidden's dtype, received ", teacher_hidden.scalar_type(), " on ", teacher_hidden.device());
  of_teacher.check(kDistillationOp);
  if (options.target()) check_target(kDistillationOp, of_student, *options.target());
}

DistillationProblem::DistillationProblem(const DistillationRowsCall& call)
    : Head(call.student()), teacher(call.teacher()), target(call.options.target()), grad_loss(call.grad_loss),
      ignore_index(call.options.ignore_index()), divergence(divergence_of(call.options.divergence())),
      beta(call.options.beta()), temperature(call.options.temperature()), averaged(call.averaged),
      workspace_mb(call.options.workspace_mb()), mask(call.mask) {
  call.check();
  check_mask(kDistillationOp, mask);
  TORCH_CHECK(hidden.dim() == 2, kDistillationOp,
              "_rows: hidden: expected shape (tokens, features), received ", hidden.sym_sizes());
  TORCH_CHECK(std::isfinite(temperature) && temperature > 0, kDistillationOp,
              ": temperature: expected a positive number, received ", temperature);
  TORCH_CHECK(divergence != kernels::Divergence::kJsd || (beta > 0 && beta < 1), kDistillationOp,
              ": beta: expected a number in (0, 1), received ", beta,
              "; for the limits 0 and 1 use divergence='forward_kl' or 'reverse_kl'");
  check_factor(kDistillationOp, "grad_loss", *this, grad_loss);
  TORCH_CHECK(grad_loss || !wants_gradient(), kDistillationOp,
              ": grad_loss: expected one with gradients, received None");
  check_workspace(kDistillationOp, workspace_mb);
}

void run_distillation_rows(torch::jit::Stack* stack, DistillationRun run) {
  const DistillationProblem problem(read_fields<DistillationRowsCall>(*stack));
  DistillationResult r = run(problem);
  fill_gradients(r.gradients, problem.hidden);
  torch::jit::drop(*stack, count_of<DistillationRowsCall>());
  push_fields(*stack, r);
}

DistillationCall DistillationCall::read(const torch::jit::Stack& stack) {
  auto call = read_fields<DistillationCall>(stack);
  call.check();
  check_reduction(kDistillationOp, call.options.reduction());
  return call;
}

Tensor DistillationCall::count() const {
  if (options.target()) return options.target()->ne(options.ignore_index()).sum(at::kDouble);
  return at::ones_symint(hidden.sym_sizes().slice(0, hidden.dim() - 1), hidden.options().dtype(at::kByte))
      .sum(at::kDouble);
}

Tensor DistillationCall::reduce(const Tensor& loss) const {
  if (!scalar()) return loss;
  const Tensor sum = loss.sum(at::kDouble);
  const Tensor result = options.reduction() == "mean" ? sum / count() : sum;  // a mean over no tokens is NaN
  return result.scalar_type() == loss.scalar_type() ? result : result.to(loss.scalar_type());
}

DistillationResult distillation_rows(const DistillationCall& call, const Tensor& upstream, const Mask& mask) {
  DistillationRowsCall rows{call, as_optional(flat(call.hidden, upstream)),
                            call.options.reduction() == "mean", mask};
  rows.hidden = flat_rows(call.hidden);
  rows.teacher_hidden = flat_rows(call.teacher_hidden);
  rows.options.lora_hidden(flat_rows(call.options.lora_hidden()));
  if (call.options.target()) rows.options.target(flat(call.hidden, *call.options.target()));
  static const Operator<DistillationRowsCall, DistillationResult> op("shoestring::_linear_distillation_rows");
  DistillationResult r = op(rows);
  r.loss = r.loss.view_symint(call.hidden.sym_sizes().slice(0, call.hidden.dim() - 1));
  view_gradients(r.gradients, mask, call.hidden, call.options.lora_hidden());
  return r;
}

namespace {

using at::Tensor;

DistillationResult distillation_rows_meta(const DistillationProblem& p) {
  DistillationResult r{
      at::empty_symint(p.hidden.sym_sizes().slice(0, 1), p.hidden.options().dtype(compute_type(p.hidden))),
      {}};
  const auto inputs = p.inputs();
  for (int i = 0; i < kInputs; ++i) {
    if (p.mask[i]) r.gradients[i] = at::empty_symint(inputs[i]->sym_sizes(), inputs[i]->options());
  }
  return r;
}

// Implements linear_distillation for calls that need no gradient. One implementation serves every device.
void distillation_without_gradients(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const auto call = DistillationCall::read(*stack);
  const Tensor loss = call.reduce(distillation_rows(call, {}, {}).loss);
  torch::jit::drop(*stack, count_of<DistillationCall>());
  torch::jit::push(*stack, loss);
}

TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("_linear_distillation_rows",
         torch::CppFunction::makeFromBoxedFunction<&boxed_distillation_rows<distillation_rows_meta>>());
}
TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  m.impl("linear_distillation", torch::CppFunction::makeFromBoxedFunction<&distillation_without_gradients>());
}

}  // namespace

}  // namespace shoestring::losses

namespace shoestring {

using at::Tensor;

Tensor linear_distillation(const Tensor& hidden, const Tensor& weight, const Tensor& teacher_hidden,
                           const Tensor& teacher_weight, const std::optional<Tensor>& bias,
                           const std::optional<Tensor>& teacher_bias, const LinearDistillationOptions& o) {
  static const Operator<losses::DistillationCall, TensorResult> op("shoestring::linear_distillation");
  return op({{hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias, o}}).tensor;
}

}  // namespace shoestring
