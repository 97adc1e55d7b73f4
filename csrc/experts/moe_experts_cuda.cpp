// moe_experts on CUDA, as on the CPU in moe_experts.cpp. The numbers of the slots stay on the GPU, so nothing
// waits for it. Slots without an expert count as rows: their products are 0, and no sum reads them.

#include <algorithm>
#include <functional>

#include <ATen/Functions.h>
#include <torch/library.h>

#include "core/cuda.h"
#include "core/tensors.h"
#include "experts/grouped_linear_cuda.h"
#include "experts/moe_experts.h"
#include "experts/moe_gate_double.h"
#include "experts/moe_sort_table.h"

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

// Writes the weighted product over `grad`, and the gradient of h. Returns the gradients of the weights. Row s
// has the weight scale[order[s]].
Tensor gate_rows_backward(const Gate& gate, const Tensor& h, const Tensor& order, const Tensor& scale,
                          const Tensor& grad, const Tensor& grad_h) {
  Tensor along = at::empty_like(scale);
  if (h.scalar_type() == at::kDouble) {
    const Tensor sorted = scale.index_select(0, order);
    return along.index_copy_(0, order, gate_backward_in_double(gate, h, sorted, grad, grad_h));
  }
  check_launch(kMoeExpertsOp,
               cuda_gate_rows(h).backward(gate, h.const_data_ptr(), order.const_data_ptr<int64_t>(),
                                          scale.const_data_ptr<float>(), h.size(0), grad.size(1),
                                          grad.mutable_data_ptr(), grad_h.mutable_data_ptr(),
                                          along.mutable_data_ptr<float>(), stream_of(h)));
  return along;
}

// Returns the weights of the slots before they are sorted.
Tensor scales_of(const Tensor& weight, at::ScalarType sums) {
  return weight.reshape({-1}).to(sums).contiguous();
}

// Returns the place of each slot in the order of moe_sort.
Tensor inverse_of(const Tensor& order) {
  Tensor inverse = at::empty_like(order);
  check_launch(kMoeExpertsOp, cuda::table<kernels::MoeSortCuda>("moe_sort")
                                  .invert(order.const_data_ptr<int64_t>(), order.size(0),
                                          inverse.mutable_data_ptr<int64_t>(), stream_of(order)));
  return inverse;
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

constexpr int64_t kDecodedBytes = int64_t{64} << 20;

// A stack of weights. Codes are decoded for some experts at a time, to a buffer that takes at most as much
// memory as the codes, and at most kDecodedBytes, unless one expert takes more.
class Stack {
 public:
  template <class Arguments>  // ExpertArguments or ExpertBackward
  Stack(const Arguments& from, bool is_down, at::ScalarType operands)
      : codes_(Backend::kCuda, from, is_down), transposed_(from.options.transposed),
        options_(from.x.options().dtype(operands)) {
    const Tensor& weight = is_down ? from.down : from.gate_up;
    if (!quantised()) dense_ = grouped_operand(weight, operands);
    room_ = std::min(kDecodedBytes, static_cast<int64_t>(weight.nbytes()));
  }

  bool quantised() const { return codes_.reader.has_value(); }

  // Returns the dense stack as the factor of rows, or of their gradients.
  GroupedFactor factor(bool backward) const { return {dense_, transposed_ != backward}; }
  int64_t columns(bool backward) const { return transposed_ != backward ? codes_.columns : codes_.rows; }

  // Writes the products of the slots to `out`.
  void multiply(const GroupedSlots& slots, const Tensor& rows, bool backward, const Tensor& bias,
                const Tensor& out) const {
    if (!quantised()) return multiply_slots(slots, rows, factor(backward), bias, out);
    const auto type = options_.dtype().toScalarType();
    const int64_t matrix = codes_.rows * codes_.columns;
    const int64_t fit = room_ / (matrix * static_cast<int64_t>(c10::elementSize(type)));
    const int64_t each = std::clamp<int64_t>(fit, 1, std::max<int64_t>(codes_.experts, 1));
    const Tensor room = at::empty({each, codes_.rows, codes_.columns},
                                  options_.dtype(type == at::kDouble ? at::kFloat : type));
    for (int64_t first = 0; first < codes_.experts; first += each) {
      const Tensor part = room.narrow(0, 0, std::min(each, codes_.experts - first));
      codes_.reader->read(first * matrix, part);
      GroupedSlots some = slots;
      some.offsets += first;
      some.groups = part.size(0);
      multiply_slots(some, rows, {part.to(type), transposed_ != backward},
                     bias.defined() ? bias.narrow(0, first, some.groups) : bias, out, /*keep=*/first > 0);
    }
  }

 private:
  ExpertCodes codes_;
  bool transposed_;
  at::TensorOptions options_;
  Tensor dense_{};
  int64_t room_ = 0;  // in bytes
};

// The low-rank update of a stack, as in expert_stack.h. Without `a`, it adds nothing.
struct Update {
  Update(const OptionalTensor& a, const OptionalTensor& b, double scaling, at::ScalarType operands)
      : scaling(scaling) {
    if (!a.has_value()) return;
    this->a = grouped_operand(*a, operands);
    this->b = grouped_operand(*b, operands);
  }

  bool defined() const { return a.defined(); }

  // Returns scaling * the product of rows with a factor (slots, rank), rounded to the dtype of operands.
  Tensor low(const GroupedSlots& slots, const Tensor& rows, const GroupedFactor& factor) const {
    const Tensor product = at::empty({slots.slots, factor.columns()},
                                     rows.options().dtype(grouped_sum_type(rows.scalar_type())));
    multiply_slots(slots, rows, factor, {}, product);
    return product.mul_(scaling).to(rows.scalar_type());
  }
  Tensor forward(const GroupedSlots& slots, const Tensor& rows) const {
    return defined() ? low(slots, rows, {a}) : Tensor();
  }
  Tensor backward(const GroupedSlots& slots, const Tensor& grad) const {
    return defined() ? low(slots, grad, {b, true}) : Tensor();
  }

  Tensor a{}, b{};
  double scaling;
};

// Changes the products with A before they are added: applies the mask of their rows.
using Mask = std::function<Tensor(const Tensor&)>;

// Returns the products of the rows of slots with a stack, plus those of `low`, if that is defined, with
// `more`.
Tensor products_of(const CudaSlots& slots, const Tensor& rows, const Stack& stack, bool backward,
                   const Tensor& bias, const Tensor& low, const GroupedFactor& more, const Mask& mask = {}) {
  const auto type = low.defined() ? grouped_sum_type(rows.scalar_type()) : rows.scalar_type();
  Tensor products = at::empty({slots.count(), stack.columns(backward)}, rows.options().dtype(type));
  stack.multiply(slots.referring(), rows, backward, bias, products);
  if (!low.defined()) return products;
  const Tensor added = at::empty_like(products);
  multiply_slots(slots.plain(), low, more, {}, added);
  return products.add_(mask ? mask(added) : added);
}

// Returns the sums of such products over the slots of tokens, in the dtype `type`. The products with a
// quantised stack exist for all columns at once, so that each code is decoded once.
Tensor sums_of(const CudaSlots& slots, const Tensor& rows, const Stack& stack, bool backward,
               const Tensor& bias, const Tensor& low, const GroupedFactor& more, const GroupedSums& sums,
               at::ScalarType type, const Mask& mask = {}) {
  const auto wide = grouped_sum_type(rows.scalar_type());
  const int64_t columns = stack.columns(backward), width = columns_in_steps(slots, columns);
  Tensor out = at::empty({slots.tokens, columns}, rows.options().dtype(low.defined() ? wide : type));
  if (stack.quantised()) {
    const Tensor products =
        at::empty({slots.count(), (columns + 3) / 4 * 4}, rows.options().dtype(wide)).narrow(1, 0, columns);
    stack.multiply(slots.plain(), rows, backward, bias, products);
    collect_products(products, sums, out);
  } else {
    sum_products(slots.plain(), rows, stack.factor(backward), bias, sums, width, out);
  }
  if (!low.defined()) return out;
  const Tensor added = at::empty_like(out);
  sum_products(slots.plain(), low, more, {}, sums, width, added);
  return out.add_(mask ? mask(added) : added).to(type);
}

ExpertResults experts_cuda(const ExpertArguments& arguments) {
  arguments.check();
  const auto [order, inverse, offsets] = arguments.sorted();
  const auto type = arguments.type(), operands = grouped_operand_type(type),
             sums = grouped_sum_type(operands);
  const Tensor x = grouped_operand(as_matrix(arguments.x).to(type), operands);
  const CudaSlots slots(offsets, at::floor_divide(order, arguments.weight.size(-1)), x.size(0));
  const Stack gate_up(arguments, /*is_down=*/false, operands), down(arguments, /*is_down=*/true, operands);
  const auto bias = [&](const OptionalTensor& b) {
    return b.has_value() ? b->to(sums).contiguous() : Tensor();
  };
  const auto& updates = arguments.updates;
  const Update gate_up_update(updates.gate_up_a, updates.gate_up_b, updates.scaling, operands),
      down_update(updates.down_a, updates.down_b, updates.scaling, operands);
  // The rows that A reads.
  const auto dropped = [&](const Tensor& rows, bool is_down) {
    return updates.dropout == 0 ? rows
                                : grouped_operand(updates.dropped(Backend::kCuda, rows, is_down), operands);
  };
  const Tensor h =
      products_of(slots, x, gate_up, /*backward=*/false, bias(arguments.gate_up_bias),
                  gate_up_update.forward(slots.referring(), dropped(x, false)), {gate_up_update.b})
          .to(type);
  const Tensor a = grouped_operand(gate_rows(arguments.options.gate(), h), operands);
  const Tensor scale = scales_of(arguments.weight, sums);
  GroupedSums of_tokens = sums_of_tokens(slots, inverse, arguments.weight.size(-1));
  of_tokens.factors = scale.const_data_ptr();
  const Tensor out =
      sums_of(slots, a, down, /*backward=*/false, bias(arguments.down_bias),
              down_update.forward(slots.plain(), dropped(a, true)), {down_update.b}, of_tokens, type);
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
  const Tensor scale = scales_of(arguments.weight, sums);
  const CudaSlots slots(arguments.offsets, at::floor_divide(order, arguments.weight.size(-1)), x.size(0),
                        order);
  const Stack gate_up(arguments, /*is_down=*/false, operands), down(arguments, /*is_down=*/true, operands);
  const auto& updates = arguments.updates;
  const Update gate_up_update(updates.gate_up_a, updates.gate_up_b, updates.scaling, operands),
      down_update(updates.down_a, updates.down_b, updates.scaling, operands);
  // The rows that A reads.
  const auto dropped = [&](const Tensor& rows, bool is_down) {
    return updates.dropout == 0 ? rows
                                : grouped_operand(updates.dropped(Backend::kCuda, rows, is_down), operands);
  };
  const auto mask = [&](bool is_down) -> Mask {
    if (updates.dropout == 0) return {};
    return [&updates, is_down](const Tensor& rows) { return updates.dropped(Backend::kCuda, rows, is_down); };
  };
  ExpertGradients gradients;

  // The gradient of a without the weight; then the weighted a.
  const Tensor grad_low_down = down_update.backward(slots.referring(), grad);
  const Tensor a =
      products_of(slots, grad, down, /*backward=*/true, {}, grad_low_down, {down_update.a, true}, mask(true))
          .to(type);
  const Tensor grad_h = at::empty_like(h);
  const Tensor along = gate_rows_backward(arguments.options.gate(), h, order, scale, a, grad_h);
  const Tensor weighted = grouped_operand(a, operands), upstream = grouped_operand(grad_h, operands);
  if (wants[kGradWeight]) {
    if (arguments.down_bias.has_value()) {
      const Tensor bias = arguments.down_bias->to(sums).contiguous();
      check_launch(kMoeExpertsOp, grouped_kernels(operands).dot(slots.referring(), grouped_matrix(grad),
                                                                bias.const_data_ptr(), grad.size(1),
                                                                along.mutable_data_ptr(), stream_of(grad)));
    }
    gradients.all[kGradWeight] = along.view(arguments.weight.sizes()).to(arguments.weight.scalar_type());
  }
  // The slots refer to the tokens of `in` or of `out`.
  const auto of_stack = [&](const Tensor& weight, const Tensor& in, const Tensor& out, bool refer_in) {
    return transposed ? add_products(slots.referring(), in, out, refer_in, weight)
                      : add_products(slots.referring(), out, in, !refer_in, weight);
  };
  if (wants[kGradDown]) gradients.all[kGradDown] = of_stack(arguments.down, weighted, grad, false);
  if (wants[kGradDownBias])
    gradients.all[kGradDownBias] = add_rows(slots.referring(), grad, /*refer=*/true, scale);
  if (wants[kGradGateUp]) gradients.all[kGradGateUp] = of_stack(arguments.gate_up, x, upstream, true);
  if (wants[kGradGateUpBias]) gradients.all[kGradGateUpBias] = add_rows(slots.plain(), upstream);
  if (wants[kGradDownA])
    gradients.all[kGradDownA] =
        add_products(slots.plain(), grad_low_down, dropped(weighted, true), false, *updates.down_a);
  if (wants[kGradDownB])
    gradients.all[kGradDownB] =
        add_products(slots.referring(), grad, down_update.forward(slots.plain(), dropped(weighted, true)),
                     /*turned=*/true, *updates.down_b);
  if (wants[kGradGateUpB])
    gradients.all[kGradGateUpB] =
        add_products(slots.plain(), upstream, gate_up_update.forward(slots.referring(), dropped(x, false)),
                     false, *updates.gate_up_b);
  if (!wants[kGradX] && !wants[kGradGateUpA]) return gradients;
  const Tensor grad_low = gate_up_update.backward(slots.plain(), upstream);
  if (wants[kGradGateUpA])
    gradients.all[kGradGateUpA] =
        add_products(slots.referring(), grad_low, dropped(x, false), false, *updates.gate_up_a);
  if (wants[kGradX]) {
    gradients.all[kGradX] =
        sums_of(slots, upstream, gate_up, /*backward=*/true, {}, grad_low, {gate_up_update.a, true},
                sums_of_tokens(slots, inverse_of(order), arguments.weight.size(-1)), type, mask(false))
            .view(arguments.x.sizes());
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
