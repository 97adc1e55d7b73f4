// The MLPs of experts: h = x[rows] W1^T, a = gate(h), and for each token the weighted sum of a W2^T. Backward
// needs x and h alone: it computes a again, and the gradient of the router's weights from a and from the
// gradient of a. No result of a product per slot has the features of x.

#include "experts/moe_experts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include <shoestring/experts/ops.h>

#include "core/call.h"
#include "core/tensors.h"
#include "core/threads.h"
#include "experts/moe_gate_double.h"
#include "experts/slots.h"
#include "gemm/products.h"

namespace shoestring::experts {

using kernels::Gate;
using kernels::GateKind;

Gate ExpertOptions::gate() const {
  const auto kind = activation == "silu"        ? GateKind::kSilu
                    : activation == "gelu"      ? GateKind::kGelu
                    : activation == "gelu_tanh" ? GateKind::kGeluTanh
                                                : GateKind::kSwigluOai;
  const auto most = static_cast<float>(limit.value_or(std::numeric_limits<double>::infinity()));
  return {kind, most, interleaved};
}

void ExpertArguments::check() const {
  const auto& [activation, limit, interleaved, transposed] = options;
  TORCH_CHECK(
      activation == "silu" || activation == "gelu" || activation == "gelu_tanh" || activation == "swigluoai",
      kMoeExpertsOp, ": activation: expected 'silu', 'gelu', 'gelu_tanh' or 'swigluoai', received '",
      activation, "'");
  TORCH_CHECK(!limit.has_value() || *limit > 0, kMoeExpertsOp,
              ": limit: expected none or a number above 0, received ", limit.value_or(0));
  TORCH_CHECK(is_supported_float(type()), kMoeExpertsOp, ": ", dtype.has_value() ? "dtype" : "x",
              ": expected fp32, fp64, bf16 or fp16, received ", type());
  TORCH_CHECK(x.dim() > 0, kMoeExpertsOp, ": x: expected shape (..., features), received a scalar");
  auto tokens = x.sym_sizes().vec(), routed = index.sym_sizes().vec();
  tokens.pop_back();
  if (!routed.empty()) routed.pop_back();
  TORCH_CHECK(index.dim() > 0 && routed == tokens && index.scalar_type() == at::kLong, kMoeExpertsOp,
              ": index: expected int64 of shape (..., top_k) with the tokens of x, ",
              c10::SymIntArrayRef(tokens), ", received ", index.sym_sizes(), " of ", index.scalar_type());
  TORCH_CHECK(weight.sym_sizes() == index.sym_sizes() && is_supported_float(weight.scalar_type()),
              kMoeExpertsOp, ": weight: expected the shape of index, ", index.sym_sizes(),
              ", in fp32, fp64, bf16 or fp16, received ", weight.sym_sizes(), " of ", weight.scalar_type());
  const auto like_x = [&](const char* name, const Tensor& t) {
    TORCH_CHECK(t.device() == x.device(), kMoeExpertsOp, ": ", name, ": expected a tensor on ", x.device(),
                ", received one on ", t.device());
  };
  const auto fits = [&](const char* name, const Tensor& t, std::vector<c10::SymInt> shape) {
    TORCH_CHECK(t.sym_sizes() == shape, kMoeExpertsOp, ": ", name, ": expected shape ",
                c10::SymIntArrayRef(shape), ", received ", t.sym_sizes());
    TORCH_CHECK(dtype.has_value() ? is_supported_float(t.scalar_type()) : t.scalar_type() == type(),
                kMoeExpertsOp, ": ", name, ": expected ",
                dtype.has_value() ? "fp32, fp64, bf16 or fp16" : c10::toString(type()), ", received ",
                t.scalar_type(),
                dtype.has_value() ? "" : "; pass dtype to multiply tensors of several dtypes");
    like_x(name, t);
  };
  like_x("index", index);
  like_x("weight", weight);
  const char* shape = transposed ? "(experts, features, 2 hidden)" : "(experts, 2 hidden, features)";
  TORCH_CHECK(gate_up.dim() == 3 && gate_up.sym_size(transposed ? 2 : 1) % 2 == 0, kMoeExpertsOp,
              ": gate_up: expected shape ", shape, ", received ", gate_up.sym_sizes());
  const c10::SymInt experts = gate_up.sym_size(0), features = x.sym_size(-1),
                    both = gate_up.sym_size(transposed ? 2 : 1), hidden = both / 2;
  using Shape = std::vector<c10::SymInt>;
  fits("gate_up", gate_up, transposed ? Shape{experts, features, both} : Shape{experts, both, features});
  fits("down", down, transposed ? Shape{experts, hidden, features} : Shape{experts, features, hidden});
  if (gate_up_bias.has_value()) fits("gate_up_bias", *gate_up_bias, {experts, both});
  if (down_bias.has_value()) fits("down_bias", *down_bias, {experts, features});
}

ExpertSlots ExpertArguments::sorted() const {
  static auto sort = find<ExpertSlots(const Tensor&, int64_t)>("shoestring::moe_sort");
  return sort.call(index, gate_up.size(0));
}

ExpertTokens::ExpertTokens(const Tensor& order, const Tensor& weight, at::ScalarType sums)
    : rows(at::floor_divide(order, weight.size(-1))),
      scale(weight.reshape({-1}).to(sums).index_select(0, order)) {}

namespace {

// A stack of weights as (experts, in_features, out_features).
struct StackOfWeights {
  StackOfWeights(const Tensor& weight, bool transposed, at::ScalarType compute)
      : view(in_order(weight, transposed, compute)) {}

  // Returns the columns [first, last) of the product with the weight, and with its transpose.
  gemm::Factor columns(int64_t e, int64_t first, int64_t last) const {
    return view[e].narrow(1, first, last - first);
  }
  gemm::Factor rows(int64_t e, int64_t first, int64_t last) const {
    return view[e].narrow(0, first, last - first).t();
  }

  Tensor view;

 private:
  static Tensor in_order(const Tensor& weight, bool transposed, at::ScalarType compute) {
    const Tensor read = readable(weight, compute);
    return transposed ? read : read.transpose(1, 2);
  }
};

// ---- the gate

const kernels::GateRows& cpu_gate_rows(const Tensor& h) {
  const auto& table = cpu::moe_gate();
  return h.scalar_type() == at::kFloat      ? table.of_float
         : h.scalar_type() == at::kBFloat16 ? table.of_bf16
                                            : table.of_fp16;
}

char* row_of(const Tensor& t, int64_t row) {
  return static_cast<char*>(t.mutable_data_ptr()) + row * t.stride(0) * t.element_size();
}

// Writes the gated features of the first `slots` rows of h to a.
void gate_rows(const Gate& gate, const Tensor& h, int64_t slots, const Tensor& a) {
  if (h.scalar_type() == at::kDouble) {
    gate_in_double(gate, h.narrow(0, 0, slots), a.narrow(0, 0, slots));
    return;
  }
  const auto& kernels = cpu_gate_rows(h);
  at::parallel_for(0, slots, row_grain(3 * a.size(1) * a.element_size()), [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) kernels.forward(gate, row_of(h, s), a.size(1), row_of(a, s));
  });
}

// Writes the weighted product over `grad`, and the gradient of h. Returns the gradient of each slot's weight.
Tensor gate_rows_backward(const Gate& gate, const Tensor& h, const Tensor& scale, int64_t slots,
                          const Tensor& grad, const Tensor& grad_h) {
  const Tensor along = at::zeros({grad.size(0)}, scale.options());
  if (h.scalar_type() == at::kDouble) {
    along.narrow(0, 0, slots)
        .copy_(gate_backward_in_double(gate, h.narrow(0, 0, slots), scale.narrow(0, 0, slots),
                                       grad.narrow(0, 0, slots), grad_h.narrow(0, 0, slots)));
    return along;
  }
  const auto& kernels = cpu_gate_rows(h);
  const float* factor = scale.const_data_ptr<float>();
  float* sums = along.mutable_data_ptr<float>();
  at::parallel_for(0, slots, row_grain(6 * grad.size(1) * grad.element_size()),
                   [&](int64_t first, int64_t last) {
                     for (int64_t s = first; s < last; ++s) {
                       sums[s] = kernels.backward(gate, row_of(h, s), factor[s], grad.size(1),
                                                  row_of(grad, s), row_of(grad_h, s));
                     }
                   });
  return along;
}

// ---- the operators on the CPU

ExpertResults experts_cpu(const ExpertArguments& arguments) {
  arguments.check();
  const auto [order, inverse, offsets] = arguments.sorted();
  const Tensor x = as_matrix(arguments.x).to(arguments.type());
  const auto compute = gemm::product_type(x), sums = compute_type(x);
  const ExpertOptions& options = arguments.options;
  const StackOfWeights gate_up(arguments.gate_up, options.transposed, compute),
      down(arguments.down, options.transposed, compute);
  const ExpertTokens tokens(order, arguments.weight, sums);
  const auto bias = [&](const OptionalTensor& b) {
    return b.has_value() ? b->to(sums).contiguous() : Tensor();
  };
  const Tensor h = at::empty({order.size(0), gate_up.view.size(2)}, x.options());
  gemm::multiply_slots(
      compute, h, {gatherable(x, compute), numbers(tokens.rows), true}, numbers(offsets),
      [&](int64_t e, int64_t first, int64_t last) { return gate_up.columns(e, first, last); },
      bias(arguments.gate_up_bias));
  const Tensor a = at::empty({order.size(0), down.view.size(1)}, x.options());
  gate_rows(options.gate(), h, numbers(offsets).back(), a);
  const Tensor out = at::empty(x.sizes(), x.options());
  gemm::sum_slots(
      compute, out, a, numbers(tokens.rows), numbers(offsets),
      [&](int64_t e, int64_t first, int64_t last) { return down.columns(e, first, last); },
      bias(arguments.down_bias), tokens.scale);
  return {out.view(arguments.x.sizes()), h, order, offsets};
}

// Adds to the gradient of each slot's weight that of the bias: the product of the token's gradient and the
// bias of the slot's expert.
void add_along_bias(const Tensor& along, const Tensor& grad, const Tensor& rows,
                    c10::ArrayRef<int64_t> offsets, const Tensor& bias) {
  for (size_t e = 0; e + 1 < offsets.size(); ++e) {
    const int64_t first = offsets[e], count = offsets[e + 1] - first;
    if (count == 0) continue;
    const Tensor mine = grad.index_select(0, rows.narrow(0, first, count)).to(along.scalar_type());
    along.narrow(0, first, count).add_(at::mv(mine, bias[static_cast<int64_t>(e)].to(along.scalar_type())));
  }
}

ExpertGradients experts_backward_cpu(const ExpertBackward& arguments) {
  const auto& wants = arguments.output_mask;
  const bool transposed = arguments.options.transposed;
  const Tensor x = as_matrix(arguments.x), h = arguments.hidden;
  const auto compute = gemm::product_type(x), sums = compute_type(x);
  const Tensor grad = gatherable(as_matrix(arguments.grad).to(x.scalar_type()), compute);
  const StackOfWeights gate_up(arguments.gate_up, transposed, compute),
      down(arguments.down, transposed, compute);
  const ExpertTokens tokens(arguments.order, arguments.weight, sums);
  const auto offsets = numbers(arguments.offsets);
  const gemm::Slots inputs{gatherable(x, compute), numbers(tokens.rows), true},
      upstream{grad, numbers(tokens.rows), true};
  ExpertGradients gradients;

  // The gradient of a without the weight; then the weighted a.
  const Tensor a = at::empty({h.size(0), down.view.size(1)}, h.options()), grad_h = at::empty_like(h);
  gemm::multiply_slots(compute, a, upstream, offsets,
                       [&](int64_t e, int64_t first, int64_t last) { return down.rows(e, first, last); });
  const Tensor along =
      gate_rows_backward(arguments.options.gate(), h, tokens.scale, offsets.back(), a, grad_h);
  if (wants[kGradWeight]) {
    if (arguments.down_bias.has_value())
      add_along_bias(along, grad, tokens.rows, offsets, *arguments.down_bias);
    const Tensor by_slot = at::empty_like(along);
    by_slot.index_copy_(0, arguments.order, along);
    gradients.all[kGradWeight] = by_slot.view(arguments.weight.sizes()).to(arguments.weight.scalar_type());
  }
  const auto of_stack = [&](const Tensor& weight, const gemm::Slots& in, const gemm::Slots& out) {
    const Tensor result = empty_results(weight.sizes(), weight, weight.scalar_type(), compute);
    gemm::multiply_by_group(compute, result, transposed ? in : out, transposed ? out : in, offsets);
    return result.to(weight.scalar_type());
  };
  if (wants[kGradDown]) gradients.all[kGradDown] = of_stack(arguments.down, {a}, upstream);
  if (wants[kGradDownBias])
    gradients.all[kGradDownBias] = sum_by_expert(grad, offsets, numbers(tokens.rows), tokens.scale);
  if (wants[kGradGateUp]) gradients.all[kGradGateUp] = of_stack(arguments.gate_up, inputs, {grad_h});
  if (wants[kGradGateUpBias]) gradients.all[kGradGateUpBias] = sum_by_expert(grad_h, offsets);
  if (wants[kGradX]) {
    const Tensor grad_x = at::empty(x.sizes(), x.options());
    gemm::sum_slots(compute, grad_x, grad_h, numbers(tokens.rows), offsets,
                    [&](int64_t e, int64_t first, int64_t last) { return gate_up.rows(e, first, last); });
    gradients.all[kGradX] = grad_x.view(arguments.x.sizes());
  }
  return gradients;
}

// ---- registration

ExpertResults experts_meta(const ExpertArguments& arguments) {
  arguments.check();
  const auto options = arguments.x.options().dtype(arguments.type());
  const auto slots = arguments.index.sym_numel();
  const Tensor& stack = arguments.gate_up;
  return {at::empty_symint(arguments.x.sym_sizes(), options),
          at::empty_symint({slots, stack.sym_size(arguments.options.transposed ? 2 : 1)}, options),
          at::empty_symint({slots}, arguments.index.options()),
          at::empty_symint({stack.sym_size(0) + 1}, arguments.index.options())};
}

ExpertGradients experts_backward_meta(const ExpertBackward& arguments) {
  ExpertGradients gradients;
  const auto like = [&](ExpertGradient i, const Tensor& t) {
    if (arguments.output_mask[i]) gradients.all[i] = at::empty_symint(t.sym_sizes(), t.options());
  };
  const auto sums = [&](ExpertGradient i, const Tensor& stack, bool transposed) {
    if (!arguments.output_mask[i]) return;
    gradients.all[i] = at::empty_symint({stack.sym_size(0), stack.sym_size(transposed ? 2 : 1)},
                                        arguments.x.options().dtype(compute_type(arguments.x)));
  };
  like(kGradX, arguments.x);
  like(kGradWeight, arguments.weight);
  like(kGradGateUp, arguments.gate_up);
  like(kGradDown, arguments.down);
  sums(kGradGateUpBias, arguments.gate_up, arguments.options.transposed);
  sums(kGradDownBias, arguments.down, arguments.options.transposed);
  return gradients;
}

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Computes the MLPs of experts: for each token the sum over its experts e of weight_e * (a W2_e^T +
  // down_bias_e), where a = activation(g) * u, and g and u are the halves of x W1_e^T + gate_up_bias_e. x
  // (..., features), index and weight (..., top_k): see moe_route; -1 is no expert. gate_up (experts, 2
  // hidden, features), down (experts, features, hidden); transposed: (experts, features, 2 hidden) and
  // (experts, hidden, features).
  // - activation: 'silu', 'gelu', 'gelu_tanh', or 'swigluoai', g * sigmoid(1.702 g) * (u + 1).
  // - limit: g is clamped to at most this number, and u to [-limit, limit].
  // - interleaved: g is at even and u at odd features, else the first and the second half.
  // dtype: as in linear.
  const std::string given = c10::str("(", schema_of<ExpertArguments>(), ") -> ");
  m.def(("moe_experts" + given + "Tensor").c_str());
  // Computes moe_experts for backward.
  m.def(("_moe_experts" + given + "(" + schema_of<ExpertResults>() + ")").c_str());
  // Returns the gradients that output_mask selects. x and grad have the dtype of the products.
  m.def(
      ("_moe_experts_backward(" + schema_of<ExpertBackward>() + ") -> (" + schema_of<ExpertGradients>() + ")")
          .c_str());
}
TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("moe_experts", boxed<&expert_forward<experts_cpu, false>>());
  m.impl("_moe_experts", boxed<&expert_forward<experts_cpu, true>>());
  m.impl("_moe_experts_backward", boxed<&expert_backward<experts_backward_cpu>>());
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("moe_experts", boxed<&expert_forward<experts_meta, false>>());
  m.impl("_moe_experts", boxed<&expert_forward<experts_meta, true>>());
  m.impl("_moe_experts_backward", boxed<&expert_backward<experts_backward_meta>>());
}

}  // namespace
}  // namespace shoestring::experts
