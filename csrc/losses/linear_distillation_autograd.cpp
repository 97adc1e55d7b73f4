#include "losses/linear_distillation.h"

#include <ATen/Functions.h>
#include <torch/library.h>

#include "core/autograd.h"
#include "core/device.h"

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
  static variable_list forward(AutogradContext* ctx, const Tensor& hidden, const Tensor& /*weight*/,
                               const OptionalTensor& /*bias*/, const OptionalTensor& /*lora_hidden*/,
                               const OptionalTensor& /*lora_B*/, const DistillationCall& call) {
    at::AutoDispatchBelowADInplaceOrView below;
    const Mask mask = call.require_grad();
    const auto compute = compute_type(hidden);
    Tensor factor;
    if (call.options.reduction() == "mean") factor = call.count().reciprocal();
    if (call.options.reduction() == "sum") factor = at::ones({}, hidden.options().dtype(compute));
    if (factor.defined() && factor.scalar_type() != compute) factor = factor.to(compute);
    const DistillationResult r = distillation_rows(call, factor, call.scalar() ? mask : Mask{});

    ctx->set_materialize_grads(false);
    Saved saved{mask, r.gradients, {}};
    if (!call.scalar()) saved.again = call;
    save_fields(ctx, saved);
    return {call.reduce(r.loss)};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    variable_list gradients(kInputs);
    if (upstream[0].defined()) {
      const auto saved = saved_fields<Saved>(ctx);
      gradients = saved.again ? again(saved, upstream[0]) : scaled(saved.gradients, upstream[0]);
      gradients = once_differentiable(kDistillationOp, std::move(gradients));
    }
    gradients.push_back(Tensor());
    return gradients;
  }

 private:
  struct Saved {
    Mask mask{};
    Gradients gradients;                    // those of a scalar loss
    std::optional<DistillationCall> again;  // the call, if the loss is not a scalar

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      visit("mask", self.mask);
      visit_gradients(self.gradients, visit);
      visit.maybe(self.again);
    }
  };

  static variable_list scaled(const Gradients& saved, const Tensor& upstream) {
    at::NoGradGuard no_grad;
    variable_list gradients;
    for (const Tensor& t : saved) gradients.push_back(t.defined() ? scale_gradient(t, upstream) : t);
    return gradients;
  }

  static variable_list again(const Saved& saved, const Tensor& upstream) {
    at::AutoDispatchBelowADInplaceOrView below;
    const DistillationResult r =
        distillation_rows(*saved.again, upstream.to(compute_type(saved.again->hidden)), saved.mask);
    return {r.gradients.begin(), r.gradients.end()};
  }
};

void distillation_autograd(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto call = read_fields<DistillationCall>(*stack);
  if (!at::GradMode::is_enabled() || !any(call.require_grad())) {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
    return;
  }
  call.check();
  check_reduction(kDistillationOp, call.options.reduction());
  variable_list out = LinearDistillation::apply(call.hidden, call.weight, call.bias,
                                                call.options.lora_hidden(), call.options.lora_B(), call);
  torch::jit::drop(*stack, count_of<DistillationCall>());
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
const AutocastRules distillation_rules([](torch::Library& m, auto device) {
  m.impl("linear_distillation", torch::CppFunction::makeFromBoxedFunction<&distillation_autocast<device>>());
});

}  // namespace
}  // namespace shoestring::losses
