#include <ATen/Functions.h>
#include <torch/library.h>

#include "core/autograd.h"
#include "losses/head_autograd.h"
#include "losses/linear_cross_entropy.h"

namespace shoestring::losses {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The autograd function of linear_cross_entropy.
//
// A scalar loss has a scalar upstream gradient. Forward therefore computes the gradients while it has the
// logits, and backward only multiplies them by the upstream gradient. This takes three matrix products in
// all. With reduction='none', or if the statistics have gradients, there is one upstream gradient per token.
// It is known only in backward, which computes the logits again.
//
// Forward must not add an unscaled gradient to weight_grad, because backward could not correct it. If
// upstream_grad gives the upstream gradient, forward adds the scaled gradient to weight_grad. Otherwise
// backward computes the logits again and adds the gradient to weight_grad.
class LinearCrossEntropy : public torch::autograd::Function<LinearCrossEntropy> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& hidden, const Tensor& weight,
                               const OptionalTensor& bias, const OptionalTensor& lora_hidden,
                               const OptionalTensor& lora_B, LinearCrossEntropyCall call) {
    at::AutoDispatchBelowADInplaceOrView below;
    Mask mask = require_grad(call);
    mask[kWeight] |= call.weight_grad.has_value();
    const Reduction reduction(call);
    reduction.balance(call);
    const auto compute = compute_type(hidden);
    const bool early = reduction.scalar && (!call.weight_grad || call.upstream_grad);
    Tensor factor = reduction.factor(compute);
    if (reduction.scalar && !factor.defined()) factor = at::ones({}, hidden.options().dtype(compute));
    const double known = call.upstream_grad.value_or(1);
    LinearCrossEntropyResult r =
        linear_cross_entropy_rows(call, {early ? factor * known : Tensor()}, early ? mask : Mask{});

    ctx->set_materialize_grads(false);
    save_mask(ctx, mask);
    ctx->saved_data["early"] = early;
    ctx->saved_data["known"] = known;
    variable_list saved(r.gradients.begin(), r.gradients.end());
    if (!early || call.stats) {
      save_options(ctx, call.options);
      ctx->saved_data["reduction"] = call.reduction;
      // weight_grad is not in save_for_backward(), which would raise if other operators add to weight_grad
      // before backward.
      ctx->saved_data["weight_grad"] = call.weight_grad;
      save_head(ctx, saved, call);
      const bool balanced = reduction.share.defined() && call.stats;
      saved.insert(saved.end(), {call.target, factor, call.class_weights.value_or(Tensor()),
                                 balanced ? reduction.share : Tensor(), balanced ? r.lse : Tensor()});
    }
    ctx->save_for_backward(saved);
    const Tensor loss = reduction.apply(r.loss);
    if (!call.stats) return {loss};
    r.loss = reduction.original(r.loss, r.lse);
    ctx->mark_non_differentiable({r.argmax});
    return {loss, r.loss, r.lse, r.entropy, r.argmax};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    variable_list saved = ctx->get_saved_variables(), gradients(kInputs);
    bool stats = false;
    for (size_t i = 1; i < upstream.size(); ++i) stats |= upstream[i].defined();
    const bool early = ctx->saved_data["early"].toBool();
    const double known = ctx->saved_data["known"].toDouble();
    if (early && !stats) {
      at::NoGradGuard no_grad;
      // scale_gradient() works in place if nothing else refers to its argument, so `saved` and `gradients`
      // hold the only references.
      for (int i = 0; i < kInputs; ++i) {
        if (!saved[i].defined() || !upstream[0].defined()) continue;
        gradients[i] = scale_gradient(saved[i], known == 1 ? upstream[0] : upstream[0] / known);
      }
    } else {
      at::AutoDispatchBelowADInplaceOrView below;
      TORCH_CHECK(!early || ctx->saved_data["weight_grad"].isNone(), kLinearCrossEntropyOp,
                  ": upstream_grad: expected an upstream gradient of the loss alone, received one of its "
                  "statistics; leave "
                  "upstream_grad out");
      gradients = again(ctx, std::move(saved), upstream);
    }
    gradients = once_differentiable("linear_cross_entropy", std::move(gradients));
    gradients.push_back(Tensor());
    return gradients;
  }

 private:
  static variable_list again(AutogradContext* ctx, variable_list tensors, const variable_list& upstream) {
    // Drops the gradients that forward has computed, which are the first kInputs saved tensors.
    tensors.erase(tensors.begin(), tensors.begin() + kInputs);
    SavedTensors saved(std::move(tensors));
    LinearCrossEntropyCall call;
    saved_head(ctx, saved, call);
    call.target = saved.next();
    const Tensor factor = saved.next();
    call.class_weights = saved.next_optional();
    const Tensor share = saved.next(), lse = saved.next();
    call.weight_grad = ctx->saved_data["weight_grad"].toOptional<Tensor>();
    call.reduction = ctx->saved_data["reduction"].toStringRef();
    call.options = saved_options(ctx, kLinearCrossEntropyOptions);

    call.input = call.hidden;
    const auto balanced = balanced_upstream(upstream, share, lse, call.z_loss());
    const auto gradient = upstream_of_tokens(balanced, factor, compute_type(call.hidden));
    const LinearCrossEntropyResult r = linear_cross_entropy_rows(call, gradient, saved_mask(ctx));
    return {r.gradients.begin(), r.gradients.end()};
  }
};

template <bool kStats>
void linear_cross_entropy_autograd(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  LinearCrossEntropyCall call(BoxedArguments(op, *stack), kStats);
  const bool adds = call.weight_grad && at::GradMode::is_enabled();
  const bool weighted = call.token_weights && needs_grad(*call.token_weights);
  const bool recorded = at::GradMode::is_enabled() && any(require_grad(call));
  if (!weighted && !recorded && !adds) {
    at::AutoDispatchBelowADInplaceOrView below;
    // A call of the operator itself would appear in the graphs of torch.compile. Inductor of PyTorch 2.11
    // fails on operators that may change an argument and return a single tensor.
    linear_cross_entropy_without_gradients<kStats>(op, stack);
    return;
  }
  TORCH_CHECK(!adds || recorded || call.upstream_grad, kLinearCrossEntropyOp,
              ": weight_grad: expected an input that requires a gradient, since backward adds to the buffer, "
              "received none; pass upstream_grad to add to it in forward");
  {
    at::AutoDispatchBelowADInplaceOrView below;
    keep_hardest(call);
  }
  std::optional<Reduction> reduction;
  // Token weights that require a gradient are applied by plain autograd operations. The autograd function is
  // therefore called without them and with reduction='none'. These operations also need each token's lse if
  // Reduction::share is defined, i.e. for a mean with class weights and z_loss.
  if (weighted) {
    TORCH_CHECK(!call.upstream_grad, kLinearCrossEntropyOp,
                ": upstream_grad: expected None with token_weights that require a gradient");
    reduction.emplace(call);
    call.token_weights.reset();
    call.reduction = "none";
    call.stats |= reduction->share.defined();
  }
  variable_list out =
      LinearCrossEntropy::apply(call.hidden, call.weight, call.bias, call.lora_hidden, call.lora_B, call);
  if (reduction) out[0] = reduction->apply(call.stats ? reduction->balanced(out[0], out[2]) : out[0]);
  if (!kStats) out.resize(1);
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (Tensor& t : out) torch::jit::push(*stack, std::move(t));
}

// Under autocast, hidden, weight and bias are cast to the autocast dtype, as for a linear layer. The loss is
// fp32 with every autocast dtype. On the CPU, the operator itself rounds an fp32 weight, and returns its
// gradient in fp32. This saves a copy of the weight and one of its gradient.
template <c10::DeviceType device>
void linear_cross_entropy_autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  const Tensor& weight = (*stack)[first + *op.schema().argumentIndexWithName("weight")].toTensor();
  if (device == at::kCPU && weight.scalar_type() == at::kFloat) {
    call_autocast(op, stack, device, {"hidden", "bias"});
  } else {
    call_autocast(op, stack, device, {"hidden", "weight", "bias"});
  }
}

void register_both(torch::Library& m, torch::CppFunction&& plain, torch::CppFunction&& with_stats) {
  m.impl("linear_cross_entropy", std::move(plain));
  m.impl("linear_cross_entropy_with_stats", std::move(with_stats));
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) {
  register_both(m, torch::CppFunction::makeFromBoxedFunction<&linear_cross_entropy_autograd<false>>(),
                torch::CppFunction::makeFromBoxedFunction<&linear_cross_entropy_autograd<true>>());
}
TORCH_LIBRARY_IMPL(shoestring, AutocastCPU, m) {
  register_both(m, torch::CppFunction::makeFromBoxedFunction<&linear_cross_entropy_autocast<at::kCPU>>(),
                torch::CppFunction::makeFromBoxedFunction<&linear_cross_entropy_autocast<at::kCPU>>());
}
TORCH_LIBRARY_IMPL(shoestring, AutocastCUDA, m) {
  register_both(m, torch::CppFunction::makeFromBoxedFunction<&linear_cross_entropy_autocast<at::kCUDA>>(),
                torch::CppFunction::makeFromBoxedFunction<&linear_cross_entropy_autocast<at::kCUDA>>());
}

}  // namespace
}  // namespace shoestring::losses
