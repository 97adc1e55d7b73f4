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

// Saves x and the input of the gates.
class MoeExperts : public torch::autograd::Function<MoeExperts> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const Tensor& gate_up,
                        const Tensor& down, const OptionalTensor& gate_up_bias,
                        const OptionalTensor& down_bias, ExpertArguments arguments) {
    at::AutoDispatchBelowADInplaceOrView below;
    Saved saved;
    saved.x_type = x.scalar_type();
    saved.bias_types = {type_of(gate_up_bias), type_of(down_bias)};
    if (x.scalar_type() != arguments.type()) arguments.x = x.to(arguments.type());
    static const Operator<ExpertArguments, ExpertResults> op("shoestring::_moe_experts");
    const ExpertResults results = op(arguments);
    ExpertBackward& kept = saved.kept;
    kept.x = arguments.x, kept.weight = weight, kept.gate_up = gate_up, kept.down = down;
    kept.hidden = results.hidden, kept.order = results.order, kept.offsets = results.offsets;
    kept.down_bias = down_bias;
    kept.options = arguments.options;
    kept.output_mask = {x.requires_grad(),    weight.requires_grad(),   gate_up.requires_grad(),
                        down.requires_grad(), wants_grad(gate_up_bias), wants_grad(down_bias)};
    save_fields(ctx, saved);
    return results.out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    auto saved = saved_fields<Saved>(ctx);  // above `below`: a checkpoint runs its function here
    at::AutoDispatchBelowADInplaceOrView below;
    saved.kept.grad = upstream[0];
    static const Operator<ExpertBackward, ExpertGradients> op("shoestring::_moe_experts_backward");
    auto [all] = op(saved.kept);
    const std::array types = {saved.x_type,
                              saved.kept.weight.scalar_type(),
                              saved.kept.gate_up.scalar_type(),
                              saved.kept.down.scalar_type(),
                              saved.bias_types[0],
                              saved.bias_types[1]};
    variable_list gradients;
    for (size_t i = 0; i < kExpertGradients; ++i)
      gradients.push_back(saved.kept.output_mask[i] ? all[i].to(types[i]) : Tensor());
    gradients = once_differentiable(kMoeExpertsOp, std::move(gradients));
    gradients.emplace_back();
    return gradients;
  }

 private:
  static at::ScalarType type_of(const OptionalTensor& t) {
    return t.has_value() ? t->scalar_type() : at::kFloat;
  }

  struct Saved {
    ExpertBackward kept{};
    at::ScalarType x_type = at::kFloat;
    std::array<at::ScalarType, 2> bias_types{};

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      ExpertBackward::fields(self.kept, visit);
      visit.each(self.x_type, self.bias_types[0], self.bias_types[1]);
    }
  };
};

void autograd(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto arguments = read_fields<ExpertArguments>(*stack);
  const auto& [x, index, weight, gate_up, down, gate_up_bias, down_bias, options, dtype] = arguments;
  const bool recorded = needs_grad(x, weight, gate_up, down) ||
                        (at::GradMode::is_enabled() && (wants_grad(gate_up_bias) || wants_grad(down_bias)));
  if (!recorded) {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
    return;
  }
  Tensor out = MoeExperts::apply(x, weight, gate_up, down, gate_up_bias, down_bias, arguments);
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
  arguments.dtype = options.dtype();
  return experts::operator_of_experts()(arguments).tensor;
}

}  // namespace shoestring
