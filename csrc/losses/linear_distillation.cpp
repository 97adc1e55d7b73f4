#include "losses/linear_distillation.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <shoestring/ops.h>
#include <torch/library.h>

#include <cmath>

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

// Checks that the student's head, the teacher's head and the target match, for linear_distillation and
// _linear_distillation_rows.
void check_heads(const Head& student, const Head& teacher, const OptionalTensor& target) {
  student.check(kDistillationOp);
  const Tensor &hidden = student.hidden, &of_teacher = teacher.hidden;
  TORCH_CHECK(of_teacher.dim() == hidden.dim() && teacher.tokens() == student.tokens(), kDistillationOp,
              ": teacher_hidden: expected hidden's shape except for the last dimension, ", hidden.sym_sizes(),
              ", received ", of_teacher.sym_sizes());
  TORCH_CHECK(is_supported_float(of_teacher.scalar_type()) && of_teacher.device() == hidden.device() &&
                  compute_type(of_teacher) == compute_type(hidden),
              kDistillationOp, ": teacher_hidden: expected ",
              hidden.scalar_type() == at::kDouble ? "fp64" : "fp32, bf16 or fp16", " on ", hidden.device(),
              ", to match hidden's dtype, received ", of_teacher.scalar_type(), " on ", of_teacher.device());
  teacher.check(kDistillationOp);
  if (target) check_target(kDistillationOp, student, *target);
}

}  // namespace

DistillationProblem::DistillationProblem(const BoxedArguments& a)
    : Head(a), teacher(a, "teacher_", vocab), target(a.optional("target")),
      grad_loss(a.optional("grad_loss")), ignore_index(a["ignore_index"].toInt()),
      divergence(divergence_of(a["divergence"].toStringRef())), beta(a.number("beta")),
      temperature(a.number("temperature")), averaged(a["averaged"].toBool()),
      workspace_mb(a["workspace_mb"].toInt()), mask(mask_of(a["output_mask"])) {
  check_heads(*this, teacher, target);
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

void push_distillation_rows(torch::jit::Stack* stack, const c10::OperatorHandle& op,
                            const DistillationResult& r, const Tensor& hidden) {
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, r.loss);
  for (const Tensor& g : r.gradients)
    torch::jit::push(*stack, g.defined() ? g : at::empty({0}, hidden.options()));
}

DistillationCall::DistillationCall(const BoxedArguments& a)
    : Head(a), teacher(a, "teacher_", vocab), target(a.optional("target")),
      reduction(a["reduction"].toStringRef()) {
  check_heads(*this, teacher, target);
  check_reduction(kDistillationOp, reduction);
  for (const char* name : kDistillationOptions) options.emplace_back(name, a[name]);
}

Tensor DistillationCall::count() const {
  if (target) return target->ne(ignore_index()).sum(at::kDouble);
  return at::ones_symint(tokens(), hidden.options().dtype(at::kByte)).sum(at::kDouble);
}

Tensor DistillationCall::reduce(const Tensor& loss) const {
  if (!scalar()) return loss;
  const Tensor sum = loss.sum(at::kDouble);
  const Tensor result = reduction == "mean" ? sum / count() : sum;  // a mean over no tokens is NaN
  return result.scalar_type() == loss.scalar_type() ? result : result.to(loss.scalar_type());
}

DistillationResult distillation_rows(const DistillationCall& call, const Tensor& upstream, const Mask& mask) {
  NamedArguments arguments = call.options;
  call.append_to(arguments);
  call.teacher.append_to(arguments);
  arguments.insert(arguments.end(), {{"averaged", call.reduction == "mean"}, {"output_mask", list_of(mask)}});
  if (call.target) arguments.emplace_back("target", flat(call, *call.target));
  if (upstream.defined()) arguments.emplace_back("grad_loss", flat(call, upstream));
  const auto out = call_by_name("shoestring::_linear_distillation_rows", arguments);
  DistillationResult r{out[0].toTensor().view_symint(call.tokens()), {}};
  for (int i = 0; i < kInputs; ++i) {
    if (mask[i]) r.gradients[i] = out[1 + i].toTensor();
  }
  if (mask[kHidden]) r.gradients[kHidden] = r.gradients[kHidden].view_symint(call.hidden.sym_sizes());
  if (mask[kLoraHidden])
    r.gradients[kLoraHidden] = r.gradients[kLoraHidden].view_symint(call.lora_hidden->sym_sizes());
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
void distillation_without_gradients(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const DistillationCall call(BoxedArguments(op, *stack));
  const Tensor loss = call.reduce(distillation_rows(call, {}, {}).loss);
  torch::jit::drop(*stack, op.schema().arguments().size());
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
  return call_by_name("shoestring::linear_distillation", {{"hidden", hidden},
                                                          {"weight", weight},
                                                          {"teacher_hidden", teacher_hidden},
                                                          {"teacher_weight", teacher_weight},
                                                          {"bias", bias},
                                                          {"teacher_bias", teacher_bias},
                                                          {"absmax", o.absmax()},
                                                          {"nested", o.nested()},
                                                          {"quant_type", o.quant_type()},
                                                          {"block_size", o.block_size()},
                                                          {"lora_hidden", o.lora_hidden()},
                                                          {"lora_B", o.lora_B()},
                                                          {"teacher_absmax", o.teacher_absmax()},
                                                          {"teacher_nested", o.teacher_nested()},
                                                          {"teacher_quant_type", o.teacher_quant_type()},
                                                          {"teacher_block_size", o.teacher_block_size()},
                                                          {"target", o.target()},
                                                          {"ignore_index", o.ignore_index()},
                                                          {"divergence", o.divergence()},
                                                          {"beta", o.beta()},
                                                          {"temperature", o.temperature()},
                                                          {"reduction", o.reduction()},
                                                          {"workspace_mb", o.workspace_mb()}})[0]
      .toTensor();
}

}  // namespace shoestring
