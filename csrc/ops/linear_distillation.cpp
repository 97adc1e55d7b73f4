#include "ops/linear_distillation.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <shoestring/ops.h>
#include <torch/library.h>

#include <cmath>
#include <utility>

#include "ops/base_weight.h"

namespace shoestring {
namespace distillation {
namespace {

void check_floating(const char* name, const Tensor& t, const Tensor& like, const char* of) {
  TORCH_CHECK(t.scalar_type() == like.scalar_type() && t.device() == like.device(), kOp, ": ", name,
              ": expected ", of, "'s dtype and device, ", like.scalar_type(), " on ", like.device(),
              ", received ", t.scalar_type(), " on ", t.device());
}

void check_bias(const char* name, const OptionalTensor& bias, const c10::SymInt& vocab, const Tensor& hidden,
                const char* of) {
  if (!bias) return;
  TORCH_CHECK(bias->dim() == 1 && bias->sym_size(0) == vocab, kOp, ": ", name, ": expected shape (", vocab,
              "), received ", bias->sym_sizes());
  check_floating(name, *bias, hidden, of);
}

kernels::Divergence divergence_of(const std::string& name) {
  if (name == "forward_kl") return kernels::Divergence::kForwardKl;
  if (name == "reverse_kl") return kernels::Divergence::kReverseKl;
  TORCH_CHECK(name == "jsd", kOp, ": divergence: expected 'forward_kl', 'reverse_kl' or 'jsd', received '",
              name, "'");
  return kernels::Divergence::kJsd;
}

Mask mask_of(const c10::IValue& value) {
  const auto list = value.toBoolList();
  return {list.get(kHidden), list.get(kWeight), list.get(kBias)};
}

// Of hidden, weight and the teacher's, whether they are a call's or its rows'.
void check_shapes(const Tensor& hidden, const Tensor& weight, const Tensor& teacher_hidden,
                  const Tensor& teacher_weight, const OptionalTensor& target) {
  TORCH_CHECK(hidden.dim() >= 1, kOp, ": hidden: expected shape (..., features), received a scalar");
  TORCH_CHECK(at::isFloatingType(hidden.scalar_type()), kOp,
              ": hidden: expected fp32, fp64, bf16 or fp16, received ", hidden.scalar_type());
  const auto tokens = hidden.sym_sizes().slice(0, hidden.dim() - 1);
  TORCH_CHECK(
      teacher_hidden.dim() == hidden.dim() && teacher_hidden.sym_sizes().slice(0, hidden.dim() - 1) == tokens,
      kOp, ": teacher_hidden: expected hidden's shape but for the last dimension, ", hidden.sym_sizes(),
      ", received ", teacher_hidden.sym_sizes());
  TORCH_CHECK(weight.dim() == 2 && weight.sym_size(1) == hidden.sym_size(-1), kOp,
              ": weight: expected shape (vocab, ", hidden.sym_size(-1), "), features as in hidden, received ",
              weight.sym_sizes());
  TORCH_CHECK(
      teacher_weight.dim() == 2 && teacher_weight.sym_size(0) == weight.sym_size(0) &&
          teacher_weight.sym_size(1) == teacher_hidden.sym_size(-1),
      kOp, ": teacher_weight: expected shape (", weight.sym_size(0), ", ", teacher_hidden.sym_size(-1),
      "), vocab as in weight and features as in teacher_hidden, received ", teacher_weight.sym_sizes());
  TORCH_CHECK(!target || target->sym_sizes() == tokens, kOp,
              ": target: expected hidden's shape without its last dimension, ", tokens, ", received ",
              target->sym_sizes());
  TORCH_CHECK(!target || target->scalar_type() == at::kLong, kOp, ": target: expected int64, received ",
              target->scalar_type(), "; call target.long()");
}

}  // namespace

Problem::Problem(const BoxedArguments& a)
    : hidden(a.tensor("hidden")),
      weight(a.tensor("weight")),
      teacher_hidden(a.tensor("teacher_hidden")),
      teacher_weight(a.tensor("teacher_weight")),
      bias(a.optional("bias")),
      teacher_bias(a.optional("teacher_bias")),
      target(a.optional("target")),
      grad_loss(a.optional("grad_loss")),
      ignore_index(a["ignore_index"].toInt()),
      divergence(divergence_of(a["divergence"].toStringRef())),
      beta(a.number("beta")),
      temperature(a.number("temperature")),
      averaged(a["averaged"].toBool()),
      workspace_mb(a["workspace_mb"].toInt()),
      mask(mask_of(a["output_mask"])) {
  check_shapes(hidden, weight, teacher_hidden, teacher_weight, target);
  TORCH_CHECK(hidden.dim() == 2, kOp, "_rows: hidden: expected shape (tokens, features), received ",
              hidden.sym_sizes());
  check_floating("weight", weight, hidden, "hidden");
  TORCH_CHECK(
      at::isFloatingType(teacher_hidden.scalar_type()) && teacher_hidden.device() == hidden.device() &&
          compute_type(teacher_hidden) == compute_type(hidden),
      kOp, ": teacher_hidden: expected ", hidden.scalar_type() == at::kDouble ? "fp64" : "fp32, bf16 or fp16",
      " on ", hidden.device(), ", as hidden's dtype asks, received ", teacher_hidden.scalar_type(), " on ",
      teacher_hidden.device());
  check_floating("teacher_weight", teacher_weight, teacher_hidden, "teacher_hidden");
  check_bias("bias", bias, weight.sym_size(0), hidden, "hidden");
  check_bias("teacher_bias", teacher_bias, weight.sym_size(0), teacher_hidden, "teacher_hidden");
  TORCH_CHECK(!target || target->device() == hidden.device(), kOp, ": target: expected hidden's device, ",
              hidden.device(), ", received ", target->device());
  TORCH_CHECK(std::isfinite(temperature) && temperature > 0, kOp,
              ": temperature: expected a positive number, received ", temperature);
  TORCH_CHECK(divergence != kernels::Divergence::kJsd || (beta > 0 && beta < 1), kOp,
              ": beta: expected a number in (0, 1), received ", beta,
              "; for what its ends stand for there are divergence='forward_kl' and 'reverse_kl'");
  TORCH_CHECK(!grad_loss || grad_loss->dim() == 0 || grad_loss->sym_sizes() == hidden.sym_sizes().slice(0, 1),
              kOp, ": grad_loss: expected shape () or (", hidden.sym_size(0), "), received ",
              grad_loss->sym_sizes());
  TORCH_CHECK(grad_loss || !wants_gradient(), kOp, ": grad_loss: expected one with gradients, received None");
  TORCH_CHECK(workspace_mb >= 0, kOp,
              ": workspace_mb: expected MiB, or 0 for the device's default, received ", workspace_mb);
}

void push(torch::jit::Stack* stack, const c10::OperatorHandle& op, const Result& r, const Tensor& hidden) {
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, r.loss);
  for (const Tensor& g : r.gradients)
    torch::jit::push(*stack, g.defined() ? g : at::empty({0}, hidden.options()));
}

Call::Call(const BoxedArguments& a)
    : hidden(a.tensor("hidden")),
      weight(a.tensor("weight")),
      teacher_hidden(a.tensor("teacher_hidden")),
      teacher_weight(a.tensor("teacher_weight")),
      bias(a.optional("bias")),
      teacher_bias(a.optional("teacher_bias")),
      target(a.optional("target")),
      reduction(a["reduction"].toStringRef()) {
  check_shapes(hidden, weight, teacher_hidden, teacher_weight, target);
  TORCH_CHECK(reduction == "mean" || reduction == "sum" || reduction == "none", kOp,
              ": reduction: expected 'mean', 'sum' or 'none', received '", reduction, "'");
  for (const char* name : kOptions) options.emplace_back(name, a[name]);
}

Tensor Call::count() const {
  if (target) return target->ne(options[0].second.toInt()).sum(at::kDouble);
  return at::ones_symint(shape(), hidden.options().dtype(at::kByte)).sum(at::kDouble);
}

Tensor Call::reduce(const Tensor& loss) const {
  if (!scalar()) return loss;
  const Tensor sum = loss.sum(at::kDouble);
  const Tensor result = reduction == "mean" ? sum / count() : sum;  // NaN for a mean over nothing
  return result.scalar_type() == loss.scalar_type() ? result : result.to(loss.scalar_type());
}

Result rows(const Call& call, const Tensor& upstream, const Mask& mask) {
  c10::SymInt tokens = 1;
  for (const auto& size : call.shape()) tokens *= size;
  const auto matrix = [&](const Tensor& t) { return t.reshape_symint({tokens, t.sym_size(-1)}); };
  NamedArguments arguments = call.options;
  arguments.insert(arguments.end(),
                   {{"hidden", matrix(call.hidden)},
                    {"weight", call.weight},
                    {"teacher_hidden", matrix(call.teacher_hidden)},
                    {"teacher_weight", call.teacher_weight},
                    {"bias", call.bias},
                    {"teacher_bias", call.teacher_bias},
                    {"averaged", call.reduction == "mean"},
                    {"output_mask", c10::List<bool>({mask[kHidden], mask[kWeight], mask[kBias]})}});
  if (call.target) arguments.emplace_back("target", call.target->reshape_symint({tokens}));
  if (upstream.defined()) {
    const bool each = upstream.dim() != 0 || call.shape().empty();
    arguments.emplace_back("grad_loss", each ? upstream.reshape_symint({tokens}) : upstream);
  }
  const auto out = call_by_name("shoestring::linear_distillation_rows", arguments);
  Result r{out[0].toTensor().view_symint(call.shape()), {}};
  for (int i = 0; i < kInputs; ++i) {
    if (mask[i]) r.gradients[i] = out[1 + i].toTensor();
  }
  if (mask[kHidden]) r.gradients[kHidden] = r.gradients[kHidden].view_symint(call.hidden.sym_sizes());
  return r;
}

}  // namespace distillation

namespace {

using at::Tensor;
using distillation::Call;
using distillation::Result;

Result on_meta(const distillation::Problem& p) {
  Result r{
      at::empty_symint(p.hidden.sym_sizes().slice(0, 1), p.hidden.options().dtype(compute_type(p.hidden))),
      {}};
  const std::optional<Tensor> inputs[] = {p.hidden, p.weight, p.bias};
  for (int i = 0; i < distillation::kInputs; ++i) {
    if (p.mask[i]) r.gradients[i] = at::empty_symint(inputs[i]->sym_sizes(), inputs[i]->options());
  }
  return r;
}

// Without gradients the operator is the same on every device.
void without_gradients(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Call call(BoxedArguments(op, *stack));
  const Tensor loss = call.reduce(distillation::rows(call, {}, {}).loss);
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, loss);
}

TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("linear_distillation_rows",
         torch::CppFunction::makeFromBoxedFunction<&distillation::boxed<on_meta>>());
}
TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  m.impl("linear_distillation", torch::CppFunction::makeFromBoxedFunction<&without_gradients>());
}

}  // namespace

Tensor linear_distillation(const Tensor& hidden, const Tensor& weight, const Tensor& teacher_hidden,
                           const Tensor& teacher_weight, const std::optional<Tensor>& bias,
                           const std::optional<Tensor>& teacher_bias, const LinearDistillationOptions& o) {
  return call_by_name("shoestring::linear_distillation", {{"hidden", hidden},
                                                          {"weight", weight},
                                                          {"teacher_hidden", teacher_hidden},
                                                          {"teacher_weight", teacher_weight},
                                                          {"bias", bias},
                                                          {"teacher_bias", teacher_bias},
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
