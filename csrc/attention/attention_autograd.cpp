#include <ATen/Functions.h>
#include <torch/library.h>

#include "attention/attention.h"
#include "core/autograd.h"

namespace shoestring::attend {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kDifferentiable[] = {"q", "k", "v", "bias", "sinks"};
constexpr const char* kTensors[] = {"alibi_slopes", "cu_seqlens_q", "cu_seqlens_k", "seed"};

// Autograd of attention. Saves the inputs, the output and the log-sum-exp of each query. Backward recomputes
// the scores.
class Attention : public torch::autograd::Function<Attention> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                               const OptionalTensor& bias, const OptionalTensor& sinks,
                               NamedArguments others) {
    at::AutoDispatchBelowADInplaceOrView below;
    const OptionalTensor inputs[] = {q, k, v, bias, sinks};
    variable_list saved;
    Mask mask{};
    for (int i = 0; i < kInputs; ++i) {
      mask[i] = inputs[i] && inputs[i]->requires_grad();
      saved.push_back(inputs[i].value_or(Tensor()));
    }
    for (const char* name : kTensors) {
      const c10::IValue value = value_of(others, name);
      saved.push_back(value.isTensor() ? value.toTensor() : Tensor());
    }
    for (const char* name : kOptions) ctx->saved_data[name] = value_of(others, name);
    ctx->saved_data["mask"] =
        c10::List<bool>(std::initializer_list<bool>{mask[0], mask[1], mask[2], mask[3], mask[4]});
    for (int i = 0; i < kInputs; ++i) others.emplace_back(kDifferentiable[i], inputs[i]);
    auto stack = call_by_name("shoestring::attention_with_lse", others);
    saved.insert(saved.end(), {stack[0].toTensor(), stack[1].toTensor()});
    ctx->save_for_backward(saved);
    ctx->set_materialize_grads(false);
    return {stack[0].toTensor(), stack[1].toTensor()};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    variable_list gradients(kInputs);
    if (upstream[0].defined() || upstream[1].defined()) gradients = again(ctx, upstream);
    gradients = once_differentiable(kOp, std::move(gradients));
    gradients.push_back(Tensor());
    return gradients;
  }

 private:
  static c10::IValue value_of(const NamedArguments& arguments, const std::string& name) {
    for (const auto& [key, value] : arguments) {
      if (key == name) return value;
    }
    return {};
  }

  static variable_list again(AutogradContext* ctx, const variable_list& upstream) {
    at::AutoDispatchBelowADInplaceOrView below;
    const variable_list saved = ctx->get_saved_variables();
    const auto optional = [](const Tensor& t) { return t.defined() ? c10::IValue(t) : c10::IValue(); };
    NamedArguments arguments;
    size_t next = 0;
    for (const char* name : kDifferentiable) arguments.emplace_back(name, optional(saved[next++]));
    for (const char* name : kTensors) arguments.emplace_back(name, optional(saved[next++]));
    for (const char* name : kOptions) arguments.emplace_back(name, ctx->saved_data[name]);
    const Tensor out = saved[next++], lse = saved[next++];
    arguments.emplace_back("grad_out", upstream[0].defined() ? upstream[0] : at::zeros_like(out));
    arguments.emplace_back("grad_lse", optional(upstream[1]));
    arguments.emplace_back("out", out);
    arguments.emplace_back("lse", lse);
    arguments.emplace_back("output_mask", ctx->saved_data["mask"]);
    const auto results = call_by_name("shoestring::_attention_backward", arguments);
    const auto mask = ctx->saved_data["mask"].toBoolList();
    variable_list gradients;
    for (int i = 0; i < kInputs; ++i) gradients.push_back(mask[i] ? results[i].toTensor() : Tensor());
    return gradients;
  }
};

template <bool kLse>
void autograd(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const BoxedArguments arguments(op, *stack);
  OptionalTensor inputs[kInputs];
  bool recorded = false;
  for (int i = 0; i < kInputs; ++i) {
    inputs[i] = arguments.optional(kDifferentiable[i]);
    recorded |= inputs[i] && needs_grad(*inputs[i]);
  }
  if (!recorded) {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
    return;
  }
  NamedArguments others;
  for (const char* name : kTensors) others.emplace_back(name, arguments[name]);
  for (const char* name : kOptions) others.emplace_back(name, arguments[name]);
  variable_list out =
      Attention::apply(*inputs[0], *inputs[1], *inputs[2], inputs[3], inputs[4], std::move(others));
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, std::move(out[0]));
  if (kLse) torch::jit::push(*stack, std::move(out[1]));
}

template <c10::DeviceType device>
void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  call_autocast(op, stack, device, {"q", "k", "v"});
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) {
  m.impl("attention", boxed<&autograd<false>>());
  m.impl("attention_with_lse", boxed<&autograd<true>>());
}
TORCH_LIBRARY_IMPL(shoestring, AutocastCPU, m) {
  m.impl("attention", boxed<&autocast<at::kCPU>>());
  m.impl("attention_with_lse", boxed<&autocast<at::kCPU>>());
}
TORCH_LIBRARY_IMPL(shoestring, AutocastCUDA, m) {
  m.impl("attention", boxed<&autocast<at::kCUDA>>());
  m.impl("attention_with_lse", boxed<&autocast<at::kCUDA>>());
}

}  // namespace
}  // namespace shoestring::attend
