#include <ATen/Functions.h>
#include <torch/library.h>

#include "core/autograd.h"
#include "core/device.h"
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
  static variable_list forward(AutogradContext* ctx, const Tensor& hidden, const Tensor& /*weight*/,
                               const OptionalTensor& /*bias*/, const OptionalTensor& /*lora_hidden*/,
                               const OptionalTensor& /*lora_B*/, LinearCrossEntropyCall call) {
    at::AutoDispatchBelowADInplaceOrView below;
    const LinearCrossEntropyOptions& o = call.options;
    Saved saved;
    saved.mask = call.require_grad();
    saved.mask[kWeight] |= o.weight_grad().has_value();
    const Reduction reduction(call);
    reduction.balance(call);
    const auto compute = compute_type(hidden);
    saved.early = reduction.scalar && (!o.weight_grad() || o.upstream_grad());
    Tensor factor = reduction.factor(compute);
    if (reduction.scalar && !factor.defined()) factor = at::ones({}, hidden.options().dtype(compute));
    saved.known = o.upstream_grad().value_or(1);
    LinearCrossEntropyResult r = linear_cross_entropy_rows(
        call, {saved.early ? factor * saved.known : Tensor()}, saved.early ? saved.mask : Mask{});

    ctx->set_materialize_grads(false);
    saved.gradients = r.gradients;
    if (!saved.early || call.stats) {
      const bool balanced = reduction.share.defined() && call.stats;
      call.options.token_weights(std::nullopt);  // part of `factor`
      saved.again = {call, factor, balanced ? reduction.share : Tensor(),
                     balanced ? reduction.slope_of_z(r.lse) : Tensor()};
    }
    save_fields(ctx, saved);
    const Tensor loss = reduction.apply(r.loss);
    if (!call.stats) return {loss};
    r.loss = reduction.original(r.loss, r.lse);
    const Tensor correct = count_correct(r.argmax, call.target);
    ctx->mark_non_differentiable({r.argmax, correct});
    return {loss, r.loss, r.lse, r.entropy, r.argmax, correct};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    auto saved = saved_fields<Saved>(ctx);
    variable_list gradients(kInputs);
    bool stats = false;
    for (size_t i = 1; i < upstream.size(); ++i) stats |= upstream[i].defined();
    if (saved.early && !stats) {
      at::NoGradGuard no_grad;
      for (int i = 0; i < kInputs; ++i) {
        if (!saved.gradients[i].defined() || !upstream[0].defined()) continue;
        gradients[i] =
            scale_gradient(saved.gradients[i], saved.known == 1 ? upstream[0] : upstream[0] / saved.known);
      }
    } else {
      at::AutoDispatchBelowADInplaceOrView below;
      TORCH_CHECK(!saved.early || !saved.again->call.options.weight_grad(), kLinearCrossEntropyOp,
                  ": upstream_grad: expected an upstream gradient of the loss alone, received one of its "
                  "statistics; leave "
                  "upstream_grad out");
      saved.gradients = {};  // frees the gradients that forward has computed
      gradients = again(*saved.again, upstream, saved.mask);
    }
    gradients = once_differentiable("linear_cross_entropy", std::move(gradients));
    gradients.push_back(Tensor());
    return gradients;
  }

 private:
  // The arguments with which backward computes the logits again.
  struct Again {
    LinearCrossEntropyCall call;
    Tensor factor, share, slope;

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      LinearCrossEntropyCall::fields(self.call, visit);
      visit("factor", self.factor);
      visit("share", self.share);
      visit("slope", self.slope);
    }
  };
  struct Saved {
    // early: whether forward has computed the gradients. known: the upstream gradient that they include.
    bool early = false;
    double known = 1;
    Mask mask{};
    Gradients gradients;
    std::optional<Again> again;

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      visit("early", self.early);
      visit("known", self.known);
      visit("mask", self.mask);
      visit_gradients(self.gradients, visit);
      visit.maybe(self.again);
    }
  };

  static variable_list again(Again& saved, const variable_list& upstream, const Mask& mask) {
    const LinearCrossEntropyCall& call = saved.call;
    const auto balanced = balanced_upstream(upstream, saved.share, saved.slope, call.options.z_loss());
    const auto gradient = upstream_of_tokens(balanced, saved.factor, compute_type(call.input));
    const LinearCrossEntropyResult r = linear_cross_entropy_rows(call, gradient, mask);
    return {r.gradients.begin(), r.gradients.end()};
  }
};

template <bool kStats>
void linear_cross_entropy_autograd(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  auto call = LinearCrossEntropyCall::read(*stack, kStats);
  LinearCrossEntropyOptions& o = call.options;
  const bool adds = o.weight_grad() && at::GradMode::is_enabled();
  const bool weighted = o.token_weights() && needs_grad(*o.token_weights());
  const bool recorded = at::GradMode::is_enabled() && any(call.require_grad());
  if (!weighted && !recorded && !adds) {
    at::AutoDispatchBelowADInplaceOrView below;
    // A call of the operator itself would appear in the graphs of torch.compile. Inductor of PyTorch 2.11
    // fails on operators that may change an argument and return a single tensor.
    linear_cross_entropy_without_gradients<kStats>(std::move(call), stack);
    return;
  }
  TORCH_CHECK(!adds || recorded || o.upstream_grad(), kLinearCrossEntropyOp,
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
    TORCH_CHECK(!o.upstream_grad(), kLinearCrossEntropyOp,
                ": upstream_grad: expected None with token_weights that require a gradient");
    reduction.emplace(call);
    o.token_weights(std::nullopt).reduction("none");
    call.stats |= reduction->share.defined();
  }
  variable_list out =
      LinearCrossEntropy::apply(call.input, call.weight, call.bias, o.lora_hidden(), o.lora_B(), call);
  if (reduction) out[0] = reduction->apply(call.stats ? reduction->balanced(out[0], out[2]) : out[0]);
  if (!kStats) out.resize(1);
  torch::jit::drop(*stack, count_of<LinearCrossEntropyCall>());
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
const AutocastRules linear_cross_entropy_rules([](torch::Library& m, auto device) {
  register_both(m, torch::CppFunction::makeFromBoxedFunction<&linear_cross_entropy_autocast<device>>(),
                torch::CppFunction::makeFromBoxedFunction<&linear_cross_entropy_autocast<device>>());
});

}  // namespace
}  // namespace shoestring::losses
