#include "losses/linear_distillation.h"

#include <ATen/Functions.h>
#include <torch/library.h>

#include "core/autograd.h"
#include "losses/head_autograd.h"

namespace shoestring::losses {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The autograd function of linear_distillation. A scalar loss has a scalar upstream gradient. Forward
// therefore computes the gradients while it has the logits, and backward only multiplies them by the upstream
// gradient. With reduction='none' there is one upstream gradient per token. It is known only in backward,
// which computes the logits of student and teacher again.
class LinearDistillation : public torch::autograd::Function<LinearDistillation> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& hidden, const Tensor& weight,
                               const OptionalTensor& bias, const OptionalTensor& lora_hidden,
                               const OptionalTensor& lora_B, const DistillationCall& call) {
    at::AutoDispatchBelowADInplaceOrView below;
    const Mask mask = require_grad(call);
    const auto compute = compute_type(hidden);
    Tensor factor;
    if (call.reduction == "mean") factor = call.count().reciprocal();
    if (call.reduction == "sum") factor = at::ones({}, hidden.options().dtype(compute));
    if (factor.defined() && factor.scalar_type() != compute) factor = factor.to(compute);
    const DistillationResult r = distillation_rows(call, factor, call.scalar() ? mask : Mask{});

    ctx->set_materialize_grads(false);
    save_mask(ctx, mask);
    ctx->saved_data["scalar"] = call.scalar();
    variable_list saved(r.gradients.begin(), r.gradients.end());
    if (!call.scalar()) {
      save_options(ctx, call.options);
      saved.clear();
      save_head(ctx, saved, call);
      save_head(ctx, saved, call.teacher);
      saved.push_back(call.target.value_or(Tensor()));
    }
    ctx->save_for_backward(saved);
    return {call.reduce(r.loss)};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    variable_list gradients(kInputs);
    if (upstream[0].defined()) {
      const variable_list saved = ctx->get_saved_variables();
      gradients =
          ctx->saved_data["scalar"].toBool() ? scaled(saved, upstream[0]) : again(ctx, saved, upstream[0]);
      gradients = once_differentiable(kDistillationOp, std::move(gradients));
    }
    gradients.push_back(Tensor());
    return gradients;
  }

 private:
  static variable_list scaled(const variable_list& saved, const Tensor& upstream) {
    at::NoGradGuard no_grad;
    variable_list gradients;
    for (const Tensor& t : saved) gradients.push_back(t.defined() ? scale_gradient(t, upstream) : t);
    return gradients;
  }

  static variable_list again(AutogradContext* ctx, const variable_list& tensors, const Tensor& upstream) {
    at::AutoDispatchBelowADInplaceOrView below;
    SavedTensors saved(tensors);
    DistillationCall call;
    saved_head(ctx, saved, call);
    saved_head(ctx, saved, call.teacher, "teacher_");
    call.target = saved.next_optional();
    call.reduction = "none";
    call.options = saved_options(ctx, kDistillationOptions);
    const DistillationResult r =
        distillation_rows(call, upstream.to(compute_type(call.hidden)), saved_mask(ctx));
    return {r.gradients.begin(), r.gradients.end()};
  }
};

void distillation_autograd(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const DistillationCall call(BoxedArguments(op, *stack));
  if (!at::GradMode::is_enabled() || !any(require_grad(call))) {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
    return;
  }
  variable_list out =
      LinearDistillation::apply(call.hidden, call.weight, call.bias, call.lora_hidden, call.lora_B, call);
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, std::move(out[0]));
}

// Under autocast, both heads' hidden, weight and bias are cast to the autocast dtype, as for a linear layer.
// The loss is fp32 with every autocast dtype.
template <c10::DeviceType device>
void distillation_autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  call_autocast(op, stack, device,
                {"hidden", "weight", "teacher_hidden", "teacher_weight", "bias", "teacher_bias"});
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) {
  m.impl("linear_distillation", torch::CppFunction::makeFromBoxedFunction<&distillation_autograd>());
}
TORCH_LIBRARY_IMPL(shoestring, AutocastCPU, m) {
  m.impl("linear_distillation",
         torch::CppFunction::makeFromBoxedFunction<&distillation_autocast<at::kCPU>>());
}
TORCH_LIBRARY_IMPL(shoestring, AutocastCUDA, m) {
  m.impl("linear_distillation",
         torch::CppFunction::makeFromBoxedFunction<&distillation_autocast<at::kCUDA>>());
}

}  // namespace
}  // namespace shoestring::losses
