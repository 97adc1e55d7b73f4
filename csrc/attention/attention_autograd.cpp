#include <ATen/Functions.h>
#include <torch/library.h>

#include "attention/attention.h"
#include "attention/attention_shapes.h"
#include "core/autograd.h"
#include "core/device.h"

namespace shoestring::attend {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Autograd of attention. Saves the inputs, the output and the log-sum-exp of each query, and what it has lost
// to rounding if a bias may make it large. Backward recomputes the scores.
class Attention : public torch::autograd::Function<Attention> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& /*q*/, const Tensor& /*k*/,
                               const Tensor& /*v*/, const OptionalTensor& /*bias*/,
                               const OptionalTensor& /*sinks*/, const Arguments& arguments) {
    at::AutoDispatchBelowADInplaceOrView below;
    Saved saved{arguments, {}, {}, {}};
    const auto inputs = arguments.inputs();
    for (int i = 0; i < kInputs; ++i) saved.mask[i] = inputs[i] && inputs[i]->requires_grad();
    if (needs_rest(arguments.options.bias())) {
      static const Operator<Arguments, ResultWithRest> op("shoestring::_attention_forward");
      const ResultWithRest result = op(arguments);
      saved.result = result, saved.lse_rest = result.lse_rest;
    } else {
      static const Operator<Arguments, Result> op("shoestring::attention_with_lse");
      saved.result = op(arguments);
    }
    save_fields(ctx, saved);
    ctx->set_materialize_grads(false);
    return {saved.result.out, saved.result.lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    variable_list gradients(kInputs);
    if (upstream[0].defined() || upstream[1].defined()) gradients = again(saved_fields<Saved>(ctx), upstream);
    gradients = once_differentiable(kOp, std::move(gradients));
    gradients.push_back(Tensor());
    return gradients;
  }

 private:
  struct Saved {
    Arguments arguments;
    Mask mask{};
    Result result;
    OptionalTensor lse_rest;

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      Arguments::fields(self.arguments, visit);
      visit("mask", self.mask);
      Result::fields(self.result, visit);
      visit("lse_rest", self.lse_rest);
    }
  };

  static variable_list again(const Saved& saved, const variable_list& upstream) {
    at::AutoDispatchBelowADInplaceOrView below;
    static const Operator<BackwardArguments, BackwardResults> op("shoestring::_attention_backward");
    const Tensor &out = saved.result.out, &lse = saved.result.lse;
    const Tensor grad_out = upstream[0].defined() ? upstream[0] : at::zeros_like(out);
    auto [gradients] =
        op({{grad_out, as_optional(upstream[1]), out, lse, saved.lse_rest, saved.mask}, saved.arguments});
    for (int i = 0; i < kInputs; ++i) {
      if (!saved.mask[i]) gradients[i] = Tensor();
    }
    return {gradients.begin(), gradients.end()};
  }
};

template <bool kLse>
void autograd(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  bool recorded = false;
  if (at::GradMode::is_enabled()) {
    // q, k, v, bias and sinks are the first arguments
    const c10::IValue* first = stack->data() + stack->size() - count_of<Arguments>();
    for (int i = 0; i < kInputs; ++i) recorded |= first[i].isTensor() && first[i].toTensor().requires_grad();
  }
  if (!recorded) {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
    return;
  }
  auto arguments = read_arguments<Arguments>(*stack);
  const Shapes shapes(arguments);  // recorded, so backward sums the gradients of what was expanded
  const variable_list results = Attention::apply(
      arguments.q, arguments.k, arguments.v, arguments.options.bias(), arguments.options.sinks(), arguments);
  Result result = shapes.restore({results[0], results[1], {}});
  torch::jit::drop(*stack, count_of<Arguments>());
  torch::jit::push(*stack, std::move(result.out));
  if (kLse) torch::jit::push(*stack, std::move(result.lse));
}

template <c10::DeviceType device>
void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  call_autocast(op, stack, device, {"q", "k", "v"});
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) {
  m.impl("attention", boxed<&autograd<false>>());
  m.impl("attention_with_lse", boxed<&autograd<true>>());
}
const AutocastRules attention_rules([](torch::Library& m, auto device) {
  for (const char* name : {"attention", "attention_with_lse"}) m.impl(name, boxed<&autocast<device>>());
});

}  // namespace
}  // namespace shoestring::attend
