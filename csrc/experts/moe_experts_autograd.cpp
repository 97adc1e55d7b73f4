// Autograd and autocast of moe_experts.

#include <algorithm>
#include <utility>

#include <ATen/Functions.h>
#include <torch/library.h>

#include <shoestring/experts/ops.h>

#include "core/autograd.h"
#include "core/device.h"
#include "core/tensors.h"
#include "experts/moe_experts.h"
#include "gemm/linear.h"

namespace shoestring::experts {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const Operator<ExpertArguments, TensorResult>& operator_of_experts() {
  static const Operator<ExpertArguments, TensorResult> op("shoestring::moe_experts");
  return op;
}

// Returns the arguments that have gradients, in the order of ExpertGradient.
std::array<OptionalTensor, kExpertGradients> differentiable(const ExpertArguments& a) {
  return {a.x,
          a.weight,
          a.gate_up,
          a.down,
          a.gate_up_bias,
          a.down_bias,
          a.updates.gate_up_a,
          a.updates.gate_up_b,
          a.updates.down_a,
          a.updates.down_b};
}

// Saves x and the input of the gates.
class MoeExperts : public torch::autograd::Function<MoeExperts> {
 public:
  // The tensors before `arguments` are those of `arguments` that have gradients.
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor&, const Tensor&, const Tensor&,
                        const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                        const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                        ExpertArguments arguments) {
    at::AutoDispatchBelowADInplaceOrView below;
    Saved saved;
    const auto inputs = differentiable(arguments);
    for (size_t i = 0; i < kExpertGradients; ++i) {
      saved.types[i] = inputs[i].has_value() ? inputs[i]->scalar_type() : at::kFloat;
      saved.kept.output_mask[i] = wants_grad(inputs[i]);
    }
    if (x.scalar_type() != arguments.type()) arguments.x = x.to(arguments.type());
    static const Operator<ExpertArguments, ExpertResults> op("shoestring::_moe_experts");
    const ExpertResults results = op(arguments);
    ExpertBackward& kept = saved.kept;
    kept.x = arguments.x, kept.weight = arguments.weight;
    kept.gate_up = arguments.gate_up, kept.down = arguments.down;
    kept.hidden = results.hidden, kept.order = results.order, kept.offsets = results.offsets;
    kept.down_bias = arguments.down_bias;
    kept.options = arguments.options, kept.scales = arguments.scales, kept.updates = arguments.updates;
    save_fields(ctx, saved);
    return results.out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    auto saved = saved_fields<Saved>(ctx);  // above `below`: a checkpoint runs its function here
    at::AutoDispatchBelowADInplaceOrView below;
    saved.kept.grad = upstream[0];
    static const Operator<ExpertBackward, ExpertGradients> op("shoestring::_moe_experts_backward");
    auto [all] = op(saved.kept);
    variable_list gradients;
    for (size_t i = 0; i < kExpertGradients; ++i)
      gradients.push_back(saved.kept.output_mask[i] ? all[i].to(saved.types[i]) : Tensor());
    gradients = once_differentiable(kMoeExpertsOp, std::move(gradients));
    gradients.emplace_back();
    return gradients;
  }

 private:
  struct Saved {
    ExpertBackward kept{};
    std::array<at::ScalarType, kExpertGradients> types{};

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      ExpertBackward::fields(self.kept, visit);
      visit.each(self.types);
    }
  };
};

void autograd(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto arguments = read_fields<ExpertArguments>(*stack);
  if (!at::GradMode::is_enabled() || std::ranges::none_of(differentiable(arguments), wants_grad)) {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
    return;
  }
  const ExpertUpdates& updates = arguments.updates;
  Tensor out = MoeExperts::apply(arguments.x, arguments.weight, arguments.gate_up, arguments.down,
                                 arguments.gate_up_bias, arguments.down_bias, updates.gate_up_a,
                                 updates.gate_up_b, updates.down_a, updates.down_b, arguments);
  torch::jit::drop(*stack, count_of<ExpertArguments>());
  torch::jit::push(*stack, std::move(out));
}

template <c10::DeviceType device>
void autocast(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard off(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  auto arguments = read_fields<ExpertArguments>(*stack);
  arguments.dtype = gemm::autocast_type<device>(arguments.x, arguments.dtype);
  Tensor out = operator_of_experts()(arguments).tensor;
  torch::jit::drop(*stack, count_of<ExpertArguments>());
  torch::jit::push(*stack, std::move(out));
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl(kMoeExpertsOp, boxed<&autograd>()); }
const AutocastRules expert_rules([](torch::Library& m, auto device) {
  m.impl(kMoeExpertsOp, boxed<&autocast<device>>());
});

}  // namespace
}  // namespace shoestring::experts

namespace shoestring {

at::Tensor moe_experts(const at::Tensor& x, const at::Tensor& index, const at::Tensor& weight,
                       const at::Tensor& gate_up, const at::Tensor& down, const MoeExpertsOptions& options) {
  experts::ExpertArguments arguments{x, index, weight, gate_up, down};
  arguments.gate_up_bias = options.gate_up_bias();
  arguments.down_bias = options.down_bias();
  arguments.options = {options.activation(), options.limit(), options.interleaved(), options.transposed()};
  arguments.scales = {options.gate_up_absmax(),        options.gate_up_nested(),
                      options.down_absmax(),           options.down_nested(),
                      options.quantize().quant_type(), options.quantize().block_size(),
                      options.hidden_features()};
  if (const auto& lora = options.lora()) {
    arguments.updates = {lora->gate_up_a(), lora->gate_up_b(), lora->down_a(), lora->down_b(),
                         lora->scaling(),   lora->dropout(),   lora->seed()};
  }
  arguments.dtype = options.dtype();
  return experts::operator_of_experts()(arguments).tensor;
}

}  // namespace shoestring
