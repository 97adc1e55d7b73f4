// moe_experts on CUDA, as on the CPU in moe_experts.cpp. The numbers of the slots stay on the GPU, so nothing
// waits for it. Slots without an expert count as rows: their products are 0, and no sum reads them.

#include <ATen/Functions.h>
#include <torch/library.h>

#include "core/cuda.h"
#include "core/tensors.h"
#include "experts/grouped_linear_cuda.h"
#include "experts/moe_experts.h"
#include "experts/moe_gate_double.h"

namespace shoestring::experts {
namespace {

using kernels::Gate;
using kernels::GateCuda;
using kernels::GroupedSlots;
using kernels::GroupedSums;

const GateCuda::Kernels& cuda_gate_rows(const Tensor& h) {
  const auto& table = cuda::table<GateCuda>("moe_gate");
  return h.scalar_type() == at::kFloat      ? table.of_float
         : h.scalar_type() == at::kBFloat16 ? table.of_bf16
                                            : table.of_fp16;
}

// Returns the gated features of the rows of h.
Tensor gate_rows(const Gate& gate, const Tensor& h) {
  Tensor a = at::empty({h.size(0), h.size(1) / 2}, h.options());
  if (h.scalar_type() == at::kDouble) {
    gate_in_double(gate, h, a);
    return a;
  }
  check_launch(kMoeExpertsOp, cuda_gate_rows(h).forward(gate, h.const_data_ptr(), h.size(0), a.size(1),
                                                        a.mutable_data_ptr(), stream_of(h)));
  return a;
}

// Writes the weighted product over `grad`, and the gradient of h. Returns the gradient of each slot's weight.
Tensor gate_rows_backward(const Gate& gate, const Tensor& h, const Tensor& scale, const Tensor& grad,
                          const Tensor& grad_h) {
  if (h.scalar_type() == at::kDouble) return gate_backward_in_double(gate, h, scale, grad, grad_h);
  Tensor along = at::empty({h.size(0)}, scale.options());
  check_launch(kMoeExpertsOp,
               cuda_gate_rows(h).backward(gate, h.const_data_ptr(), scale.const_data_ptr<float>(), h.size(0),
                                          grad.size(1), grad.mutable_data_ptr(), grad_h.mutable_data_ptr(),
                                          along.mutable_data_ptr<float>(), stream_of(h)));
  return along;
}

// The sums over the slots of each token, in the order of its experts.
GroupedSums sums_of_tokens(const CudaSlots& slots, const Tensor& inverse, int64_t top_k) {
  GroupedSums sums{inverse.const_data_ptr<int64_t>()};
  sums.each = top_k;
  sums.end = slots.offsets.const_data_ptr<int64_t>() + slots.offsets.size(0) - 1;
  return sums;
}

// Returns how many columns of the products of all slots take about as much memory as rows with `columns`.
int64_t columns_in_steps(const CudaSlots& slots, int64_t columns) {
  return slots.count() == 0 ? columns : columns * slots.tokens / slots.count();
}

ExpertResults experts_cuda(const ExpertArguments& arguments) {
  arguments.check();
  const auto [order, inverse, offsets] = arguments.sorted();
  const auto type = arguments.type(), operands = grouped_operand_type(type),
             sums = grouped_sum_type(operands);
  const bool transposed = arguments.options.transposed;
  const Tensor x = grouped_operand(as_matrix(arguments.x).to(type), operands);
  const ExpertTokens tokens(order, arguments.weight, sums);
  const CudaSlots slots(offsets, tokens.rows, x.size(0));
  const GroupedFactor gate_up{grouped_operand(arguments.gate_up, operands), transposed},
      down{grouped_operand(arguments.down, operands), transposed};
  const auto bias = [&](const OptionalTensor& b) {
    return b.has_value() ? b->to(sums).contiguous() : Tensor();
  };
  const Tensor products = at::empty({slots.count(), gate_up.columns()}, x.options());
  multiply_slots(slots.referring(), x, gate_up, bias(arguments.gate_up_bias), products);
  const Tensor h = products.to(type), a = grouped_operand(gate_rows(arguments.options.gate(), h), operands);
  const Tensor out = at::empty(x.sizes(), h.options());
  const Tensor scale = arguments.weight.reshape({-1}).to(sums).contiguous();
  GroupedSums of_tokens = sums_of_tokens(slots, inverse, arguments.weight.size(-1));
  of_tokens.factors = scale.const_data_ptr();
  sum_products(slots.plain(), a, down, bias(arguments.down_bias), of_tokens,
               columns_in_steps(slots, out.size(1)), out);
  return {out.view(arguments.x.sizes()), h, order, slots.offsets};
}

ExpertGradients experts_backward_cuda(const ExpertBackward& arguments) {
  const auto& wants = arguments.output_mask;
  const bool transposed = arguments.options.transposed;
  const auto type = arguments.x.scalar_type(), operands = grouped_operand_type(type),
             sums = grouped_sum_type(operands);
  const Tensor x = grouped_operand(as_matrix(arguments.x), operands),
               grad = grouped_operand(as_matrix(arguments.grad).to(type), operands);
  const Tensor h = arguments.hidden.contiguous(), order = arguments.order.contiguous();
  const Tensor inverse =
      at::empty_like(order).index_copy_(0, order, at::arange(order.size(0), order.options()));
  const ExpertTokens tokens(order, arguments.weight, sums);
  const CudaSlots slots(arguments.offsets, tokens.rows, x.size(0));
  // the factors of the gradients: the transposed weights
  const GroupedFactor gate_up{grouped_operand(arguments.gate_up, operands), !transposed},
      down{grouped_operand(arguments.down, operands), !transposed};
  ExpertGradients gradients;

  // The gradient of a without the weight; then the weighted a.
  const Tensor products = at::empty({slots.count(), down.columns()}, grad.options());
  multiply_slots(slots.referring(), grad, down, {}, products);
  const Tensor a = products.to(type), grad_h = at::empty_like(h);
  const Tensor along = gate_rows_backward(arguments.options.gate(), h, tokens.scale, a, grad_h);
  const Tensor weighted = grouped_operand(a, operands), upstream = grouped_operand(grad_h, operands);
  if (wants[kGradWeight]) {
    if (arguments.down_bias.has_value()) {
      const Tensor bias = arguments.down_bias->to(sums).contiguous();
      check_launch(kMoeExpertsOp, grouped_kernels(operands).dot(slots.referring(), grouped_matrix(grad),
                                                                bias.const_data_ptr(), grad.size(1),
                                                                along.mutable_data_ptr(), stream_of(grad)));
    }
    gradients.all[kGradWeight] =
        along.index_select(0, inverse).view(arguments.weight.sizes()).to(arguments.weight.scalar_type());
  }
  // The slots refer to the tokens of `in` or of `out`.
  const auto of_stack = [&](const Tensor& weight, const Tensor& in, const Tensor& out, bool refer_in) {
    return transposed ? add_products(slots.referring(), in, out, refer_in, weight)
                      : add_products(slots.referring(), out, in, !refer_in, weight);
  };
  if (wants[kGradDown]) gradients.all[kGradDown] = of_stack(arguments.down, weighted, grad, false);
  if (wants[kGradDownBias])
    gradients.all[kGradDownBias] = add_rows(slots.referring(), grad, /*refer=*/true, tokens.scale);
  if (wants[kGradGateUp]) gradients.all[kGradGateUp] = of_stack(arguments.gate_up, x, upstream, true);
  if (wants[kGradGateUpBias]) gradients.all[kGradGateUpBias] = add_rows(slots.plain(), upstream);
  if (wants[kGradX]) {
    const Tensor grad_x = at::empty(x.sizes(), h.options());
    sum_products(slots.plain(), upstream, gate_up, {},
                 sums_of_tokens(slots, inverse, arguments.weight.size(-1)),
                 columns_in_steps(slots, grad_x.size(1)), grad_x);
    gradients.all[kGradX] = grad_x.view(arguments.x.sizes());
  }
  return gradients;
}

TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("moe_experts", boxed<&expert_forward<experts_cuda, false>>());
  m.impl("_moe_experts", boxed<&expert_forward<experts_cuda, true>>());
  m.impl("_moe_experts_backward", boxed<&expert_backward<experts_backward_cuda>>());
}

}  // namespace
}  // namespace shoestring::experts
