#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "autograd/common.h"
#include "ops/base_weight.h"
#include "ops/linear_cross_entropy.h"

namespace shoestring {
namespace {

using at::Tensor;
using cross_entropy::Call;
using cross_entropy::Mask;
using cross_entropy::Reduction;
using cross_entropy::Result;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A scalar loss has a scalar upstream gradient, so the gradients are made in forward, while the logits are there, and
// only multiplied in backward: three matrix products in all. reduction='none', and gradients of the statistics, have one
// upstream gradient per token, known only in backward, and compute the logits a second time.
class LinearCrossEntropy : public torch::autograd::Function<LinearCrossEntropy> {
 public:
  // The last of which tells Function which tensors have gradients, and call has all of them.
  static variable_list forward(AutogradContext* ctx, const Tensor& hidden, const Tensor& weight,
                               const cross_entropy::OptionalTensor& bias, const Call& call) {
    at::AutoDispatchBelowADInplaceOrView below;
    const Mask mask{hidden.requires_grad(), weight.requires_grad(), bias && bias->requires_grad()};
    const Reduction reduction(call);
    const Tensor factor = reduction.factor(compute_type(hidden));
    const bool early = reduction.scalar;
    const Tensor one = early && !factor.defined() ? at::ones({}, hidden.options().dtype(compute_type(hidden))) : factor;
    const Result r = cross_entropy::rows(call, {early ? one : Tensor()}, early ? mask : Mask{});

    ctx->set_materialize_grads(false);
    for (int i = 0; i < 3; ++i) ctx->saved_data[kMask[i]] = mask[i];
    ctx->saved_data["early"] = early;
    variable_list saved{r.grad_hidden, r.grad_weight, r.grad_bias};
    if (!early || call.stats) {
      for (const auto& [name, value] : call.options) ctx->saved_data[name] = value;
      ctx->saved_data["reduction"] = call.reduction;
      saved.insert(saved.end(), {hidden, weight, bias.value_or(Tensor()), call.target,
                                 call.class_weights.value_or(Tensor()), one});
    }
    ctx->save_for_backward(saved);
    const Tensor loss = reduction.apply(r.loss);
    if (!call.stats) return {loss};
    ctx->mark_non_differentiable({r.argmax});
    return {loss, r.loss, r.lse, r.entropy, r.argmax};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    variable_list saved = ctx->get_saved_variables(), gradients(3);
    Mask mask;
    for (int i = 0; i < 3; ++i) mask[i] = ctx->saved_data[kMask[i]].toBool();
    bool stats = false;
    for (size_t i = 1; i < upstream.size(); ++i) stats |= upstream[i].defined();
    if (ctx->saved_data["early"].toBool() && !stats) {
      at::NoGradGuard no_grad;
      // The saved tensor, and one of these two names for it, are all that hold the gradient from here on.
      for (int i = 0; i < 3; ++i) {
        if (mask[i] && upstream[0].defined()) gradients[i] = scale_gradient(saved[i], upstream[0]);
      }
    } else {
      at::AutoDispatchBelowADInplaceOrView below;
      gradients = again(ctx, saved, upstream, mask);
    }
    gradients = once_differentiable("linear_cross_entropy", std::move(gradients));
    return {gradients[0], gradients[1], gradients[2], Tensor()};
  }

 private:
  static constexpr const char* kMask[] = {"needs_hidden", "needs_weight", "needs_bias"};

  static variable_list again(AutogradContext* ctx, const variable_list& saved, const variable_list& upstream,
                             const Mask& mask) {
    const auto optional = [](const Tensor& t) { return t.defined() ? std::optional<Tensor>(t) : std::nullopt; };
    Call call;
    call.hidden = saved[3], call.weight = saved[4], call.target = saved[6];
    call.bias = optional(saved[5]), call.class_weights = optional(saved[7]);
    call.reduction = ctx->saved_data["reduction"].toStringRef();
    for (const char* name : cross_entropy::kOptions) call.options.emplace_back(name, ctx->saved_data[name]);
    const auto compute = compute_type(call.hidden);
    std::array<Tensor, 3> gradient;
    if (upstream[0].defined()) {
      gradient[0] = saved[8].defined() ? saved[8] * upstream[0].to(compute) : upstream[0].to(compute);
    }
    for (size_t i = 1; i < upstream.size() && i <= 3; ++i) {
      if (!upstream[i].defined()) continue;
      Tensor& sum = gradient[i - 1];
      sum = sum.defined() ? sum + upstream[i].to(compute) : upstream[i].to(compute);
    }
    const Result r = cross_entropy::rows(call, gradient, mask);
    return {r.grad_hidden, r.grad_weight, r.grad_bias};
  }
};

template <bool kStats>
void autograd(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call(BoxedArguments(op, *stack), kStats);
  const bool weighted = call.token_weights && needs_grad(*call.token_weights);
  if (!weighted && !needs_grad(call.hidden, call.weight, call.bias.value_or(call.hidden))) {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
    return;
  }
  std::optional<Reduction> reduction;
  if (weighted) {  // plain autograd has what they need: the losses of the tokens
    reduction.emplace(call);
    call.token_weights.reset();
    call.reduction = "none";
  }
  variable_list out = LinearCrossEntropy::apply(call.hidden, call.weight, call.bias, call);
  if (reduction) out[0] = reduction->apply(out[0]);
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (Tensor& t : out) torch::jit::push(*stack, std::move(t));
}

// Under autocast the operands take the autocast dtype, as for a linear layer; the loss is fp32 whatever they are.
template <c10::DeviceType device>
void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard off(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const size_t first = stack->size() - op.schema().arguments().size();
  for (const char* name : {"hidden", "weight", "bias"}) {
    c10::IValue& argument = (*stack)[first + *op.schema().argumentIndexWithName(name)];
    if (argument.isNone()) continue;
    argument = at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), argument.toTensor(), device);
  }
  op.callBoxed(stack);
}

void both(torch::Library& m, torch::CppFunction&& plain, torch::CppFunction&& with_stats) {
  m.impl("linear_cross_entropy", std::move(plain));
  m.impl("linear_cross_entropy_with_stats", std::move(with_stats));
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) {
  both(m, torch::CppFunction::makeFromBoxedFunction<&autograd<false>>(),
       torch::CppFunction::makeFromBoxedFunction<&autograd<true>>());
}
TORCH_LIBRARY_IMPL(shoestring, AutocastCPU, m) {
  both(m, torch::CppFunction::makeFromBoxedFunction<&autocast<at::kCPU>>(),
       torch::CppFunction::makeFromBoxedFunction<&autocast<at::kCPU>>());
}
TORCH_LIBRARY_IMPL(shoestring, AutocastCUDA, m) {
  both(m, torch::CppFunction::makeFromBoxedFunction<&autocast<at::kCUDA>>(),
       torch::CppFunction::makeFromBoxedFunction<&autocast<at::kCUDA>>());
}

}  // namespace
}  // namespace shoestring
