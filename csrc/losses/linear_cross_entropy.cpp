#include "losses/linear_cross_entropy.h"

#include <cmath>
#include <utility>

#include <ATen/Functions.h>
#include <torch/library.h>

#include <shoestring/ops.h>

#include "core/tensors.h"

namespace shoestring::losses {
void push_linear_cross_entropy_rows(torch::jit::Stack* stack, const c10::OperatorHandle& op,
                                    const LinearCrossEntropyResult& r, const Tensor& hidden) {
  const auto compute = hidden.options().dtype(compute_type(hidden));
  const auto or_empty = [](const Tensor& t, at::TensorOptions options) {
    return t.defined() ? t : at::empty({0}, options);
  };
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, r.loss, r.lse, or_empty(r.entropy, compute),
                   or_empty(r.argmax, compute.dtype(at::kLong)));
  for (const Tensor& gradient : r.gradients) torch::jit::push(*stack, or_empty(gradient, hidden.options()));
}

LinearCrossEntropyCall::LinearCrossEntropyCall(const BoxedArguments& a, bool stats)
    : Head(a), TokenCall(kLinearCrossEntropyOp, a, hidden, vocab, stats),
      weight_grad(a.optional("weight_grad")), upstream_grad(a["upstream_grad"].toOptional<double>()) {
  check(kLinearCrossEntropyOp, /*wide=*/true);
  TORCH_CHECK(
      !upstream_grad || (weight_grad && std::isfinite(*upstream_grad) && *upstream_grad != 0),
      kLinearCrossEntropyOp,
      ": upstream_grad: expected None, or a finite number that is not 0 together with weight_grad, received ",
      *upstream_grad);
  TORCH_CHECK(
      !upstream_grad || reduction != "none", kLinearCrossEntropyOp,
      ": upstream_grad: expected None with reduction='none', whose upstream gradients are not one number");
  for (const char* name : kLinearCrossEntropyOptions) options.emplace_back(name, a[name]);
}

LinearCrossEntropyResult linear_cross_entropy_rows(const LinearCrossEntropyCall& call,
                                                   const std::array<Tensor, 3>& upstream, const Mask& mask) {
  NamedArguments arguments = call.options;
  call.append_to(arguments);
  arguments.insert(arguments.end(), {{"target", flat(call, call.target)},
                                     {"class_weights", call.class_weights},
                                     {"weight_grad", call.weight_grad},
                                     {"averaged", call.reduction == "mean"},
                                     {"stats", call.stats},
                                     {"output_mask", list_of(mask)}});
  const char* factors[] = {"grad_loss", "grad_lse", "grad_entropy"};
  for (int i = 0; i < 3; ++i) {
    if (upstream[i].defined()) arguments.emplace_back(factors[i], flat(call, upstream[i]));
  }
  const auto out = call_by_name("shoestring::_linear_cross_entropy_rows", arguments);
  const auto shaped = [&](int i) { return out[i].toTensor().view_symint(call.target.sym_sizes()); };
  LinearCrossEntropyResult r{
      {shaped(0), shaped(1), call.stats ? shaped(2) : Tensor(), call.stats ? shaped(3) : Tensor()}, {}};
  for (int i = 0; i < kInputs; ++i) {
    if (mask[i] && !(i == kWeight && call.weight_grad)) r.gradients[i] = out[4 + i].toTensor();
  }
  if (mask[kHidden]) r.gradients[kHidden] = r.gradients[kHidden].view_symint(call.hidden.sym_sizes());
  if (mask[kLoraHidden])
    r.gradients[kLoraHidden] = r.gradients[kLoraHidden].view_symint(call.lora_hidden->sym_sizes());
  return r;
}

template <bool kStats>
void linear_cross_entropy_without_gradients(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  LinearCrossEntropyCall call(BoxedArguments(op, *stack), kStats);
  keep_hardest(call);
  const Reduction reduction(call);
  reduction.balance(call);
  const LinearCrossEntropyResult r = linear_cross_entropy_rows(call, {}, {});
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, reduction.apply(r.loss));
  if constexpr (kStats)
    torch::jit::push(*stack, reduction.original(r.loss, r.lse), r.lse, r.entropy, r.argmax);
}
template void linear_cross_entropy_without_gradients<false>(const c10::OperatorHandle&, torch::jit::Stack*);
template void linear_cross_entropy_without_gradients<true>(const c10::OperatorHandle&, torch::jit::Stack*);

namespace {

using at::Tensor;

LinearCrossEntropyResult linear_cross_entropy_rows_meta(const LinearCrossEntropyProblem& p) {
  const auto compute = p.hidden.options().dtype(compute_type(p.hidden));
  const auto each = [&](at::TensorOptions options) {
    return at::empty_symint(p.target.sym_sizes(), options);
  };
  LinearCrossEntropyResult r{{each(compute), each(compute), p.stats ? each(compute) : Tensor(),
                              p.stats ? each(compute.dtype(at::kLong)) : Tensor()},
                             {}};
  const auto inputs = p.inputs();
  for (int i = 0; i < kInputs; ++i) {
    if (!p.mask[i] || (i == kWeight && p.weight_grad)) continue;
    r.gradients[i] = at::empty_symint(inputs[i]->sym_sizes(), inputs[i]->options());
  }
  return r;
}

TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("_linear_cross_entropy_rows",
         torch::CppFunction::makeFromBoxedFunction<
             &boxed_linear_cross_entropy_rows<linear_cross_entropy_rows_meta>>());
}
TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  m.impl("linear_cross_entropy",
         torch::CppFunction::makeFromBoxedFunction<&linear_cross_entropy_without_gradients<false>>());
  m.impl("linear_cross_entropy_with_stats",
         torch::CppFunction::makeFromBoxedFunction<&linear_cross_entropy_without_gradients<true>>());
}

torch::jit::Stack call_linear_cross_entropy(const char* op, const Tensor& hidden, const Tensor& weight,
                                            const Tensor& target, const std::optional<Tensor>& bias,
                                            const LinearCrossEntropyOptions& o) {
  return call_by_name(op, {{"hidden", hidden},
                           {"weight", weight},
                           {"target", target},
                           {"bias", bias},
                           {"ignore_index", o.ignore_index()},
                           {"reduction", o.reduction()},
                           {"label_smoothing", o.label_smoothing()},
                           {"softcap", o.softcap()},
                           {"logit_scale", o.logit_scale()},
                           {"z_loss", o.z_loss()},
                           {"filter_eps", o.filter_eps()},
                           {"class_weights", o.class_weights()},
                           {"token_weights", o.token_weights()},
                           {"shift", o.shift()},
                           {"hard_fraction", o.hard_fraction()},
                           {"lora_hidden", o.lora_hidden()},
                           {"lora_B", o.lora_B()},
                           {"absmax", o.absmax()},
                           {"nested", o.nested()},
                           {"quant_type", o.quant_type()},
                           {"block_size", o.block_size()},
                           {"weight_grad", o.weight_grad()},
                           {"upstream_grad", o.upstream_grad()},
                           {"workspace_mb", o.workspace_mb()}});
}

}  // namespace

}  // namespace shoestring::losses

namespace shoestring {

using at::Tensor;

Tensor linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& target,
                            const std::optional<Tensor>& bias, const LinearCrossEntropyOptions& options) {
  return losses::call_linear_cross_entropy("shoestring::linear_cross_entropy", hidden, weight, target, bias,
                                           options)[0]
      .toTensor();
}

LinearCrossEntropyStats linear_cross_entropy_with_stats(const Tensor& hidden, const Tensor& weight,
                                                        const Tensor& target,
                                                        const std::optional<Tensor>& bias,
                                                        const LinearCrossEntropyOptions& options) {
  const auto out = losses::call_linear_cross_entropy("shoestring::linear_cross_entropy_with_stats", hidden,
                                                     weight, target, bias, options);
  return {out[0].toTensor(), out[1].toTensor(), out[2].toTensor(), out[3].toTensor(), out[4].toTensor()};
}

}  // namespace shoestring
