// The MLPs of experts: h = x[rows] W1^T, a = gate(h), and for each token the weighted sum of a W2^T. Backward
// needs x and h alone: it computes a again, and the gradient of the router's weights from a and from the
// gradient of a. No result of a product per slot has the features of x.

#include "experts/moe_experts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include <shoestring/experts/ops.h>

#include "core/call.h"
#include "core/huge_pages.h"
#include "core/tensors.h"
#include "core/threads.h"
#include "experts/expert_stack.h"
#include "experts/moe_gate_double.h"
#include "experts/moe_route_table.h"
#include "experts/slots.h"
#include "gemm/products.h"
#include "gemm/skinny_gemm_table.h"
#include "layers/seeded_dropout.h"

namespace shoestring::experts {

using kernels::Gate;
using kernels::GateKind;
using Shape = std::vector<c10::SymInt>;

Gate ExpertOptions::gate() const {
  const auto kind = activation == "silu"        ? GateKind::kSilu
                    : activation == "gelu"      ? GateKind::kGelu
                    : activation == "gelu_tanh" ? GateKind::kGeluTanh
                                                : GateKind::kSwigluOai;
  const auto most = static_cast<float>(limit.value_or(std::numeric_limits<double>::infinity()));
  return {kind, most, interleaved};
}

ExpertSizes sizes_of(const Tensor& x, const Tensor& gate_up, const ExpertScales& scales, bool transposed) {
  const c10::SymInt features = x.sym_size(-1);
  if (!scales.gate_up_absmax.has_value())
    return {gate_up.sym_size(0), features, gate_up.sym_size(transposed ? 2 : 1) / 2};
  const c10::SymInt hidden = *scales.hidden_features;
  return {gate_up.sym_numel() * (scales.quant_type == "int8" ? 1 : 2) / (2 * hidden * features), features,
          hidden};
}

void ExpertArguments::like_x(const std::string& name, const Tensor& t) const {
  TORCH_CHECK(t.device() == x.device(), kMoeExpertsOp, ": ", name, ": expected a tensor on ", x.device(),
              ", received one on ", t.device());
}

Shape ExpertArguments::stack_shape(const c10::SymInt& experts, const c10::SymInt& out,
                                   const c10::SymInt& in) const {
  return options.transposed ? Shape{experts, in, out} : Shape{experts, out, in};
}

void ExpertArguments::check_gate_up() const {
  const auto& hidden = scales.hidden_features;
  if (!scales.gate_up_absmax.has_value()) {
    const int64_t dim = options.transposed ? 2 : 1;
    TORCH_CHECK(gate_up.dim() == 3 && gate_up.sym_size(dim) % 2 == 0, kMoeExpertsOp,
                ": gate_up: expected shape ",
                options.transposed ? "(experts, features, 2 hidden)" : "(experts, 2 hidden, features)",
                ", received ", gate_up.sym_sizes());
    TORCH_CHECK(!hidden.has_value() || gate_up.sym_size(dim) == 2 * *hidden, kMoeExpertsOp,
                ": hidden_features: expected half of the ", gate_up.sym_size(dim),
                " features of gate_up, received ", hidden.value_or(0));
    return;
  }
  TORCH_CHECK(hidden.value_or(0) > 0, kMoeExpertsOp,
              ": hidden_features: expected a number above 0 with a quantised gate_up, received ",
              hidden.has_value() ? std::to_string(*hidden) : "none");
  const c10::SymInt features = x.sym_size(-1);
  TORCH_CHECK(features > 0, kMoeExpertsOp, ": x: expected features with a quantised gate_up, received none");
  const c10::SymInt codes = gate_up.sym_numel() * (scales.quant_type == "int8" ? 1 : 2);
  const c10::SymInt matrix = 2 * *hidden * features;
  TORCH_CHECK(codes % matrix == 0, kMoeExpertsOp, ": gate_up: expected ", matrix,
              " codes for each expert, 2 hidden_features * features, received ", codes, " codes");
  check_codes("gate_up", gate_up, scales.gate_up_absmax, scales.gate_up_nested, codes / matrix, 2 * *hidden,
              features);
}

void ExpertArguments::check_codes(const std::string& name, const Tensor& codes, const OptionalTensor& absmax,
                                  const OptionalTensor& nested, const c10::SymInt& experts,
                                  const c10::SymInt& out, const c10::SymInt& in) const {
  like_x(name, codes);
  like_x(name + "_absmax", *absmax);
  if (nested.has_value()) like_x(name + "_nested", *nested);
  const std::string where = kMoeExpertsOp + (": " + name);
  const c10::SymInt block = scales.block(options.transposed ? out : in);
  quantization::check_packed(where.c_str(), codes, *absmax, nested, experts * out * in, scales.quant_type,
                             block.guard_int(__FILE__, __LINE__), x.device());
  TORCH_CHECK(out * in % block == 0, where, ": expected whole blocks of ", block,
              " elements for each expert, received matrices of ", out, " x ", in,
              "; quantise with a block_size that divides their elements");
}

void ExpertArguments::check_update(const std::string& name, const OptionalTensor& a, const OptionalTensor& b,
                                   const c10::SymInt& experts, const c10::SymInt& in,
                                   const c10::SymInt& out) const {
  TORCH_CHECK(a.has_value() == b.has_value(), kMoeExpertsOp, ": ", name, a.has_value() ? "_b" : "_a",
              ": expected a tensor with ", name, a.has_value() ? "_a" : "_b", ", received none");
  if (!a.has_value()) return;
  const auto fits = [&](const std::string& part, const Tensor& t, bool shape, const Shape& expected) {
    TORCH_CHECK(shape && is_supported_float(t.scalar_type()), kMoeExpertsOp, ": ", part, ": expected shape ",
                c10::SymIntArrayRef(expected), " in fp32, fp64, bf16 or fp16, received ", t.sym_sizes(),
                " of ", t.scalar_type());
    like_x(part, t);
  };
  const c10::SymInt rank = a->dim() == 3 ? a->sym_size(1) : 0;
  TORCH_CHECK(rank > 0, kMoeExpertsOp, ": ", name, "_a: expected shape (experts, rank, ", in,
              ") with a rank above 0, received ", a->sym_sizes());
  fits(name + "_a", *a, a->sym_sizes() == Shape{experts, rank, in}, {experts, rank, in});
  fits(name + "_b", *b, b->sym_sizes() == Shape{experts, out, rank}, {experts, out, rank});
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
  const auto fits = [&](const char* name, const Tensor& t, const std::vector<c10::SymInt>& shape) {
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
  check_gate_up();
  const auto [experts, features, hidden] = sizes();
  const c10::SymInt both = 2 * hidden;
  TORCH_CHECK(experts > 0 && experts <= kernels::kMostExperts, kMoeExpertsOp, ": gate_up: expected 1 to ",
              kernels::kMostExperts, " experts, received ", experts);
  if (!scales.gate_up_absmax.has_value()) fits("gate_up", gate_up, stack_shape(experts, both, features));
  if (scales.down_absmax.has_value()) {
    check_codes("down", down, scales.down_absmax, scales.down_nested, experts, features, hidden);
  } else {
    fits("down", down, stack_shape(experts, features, hidden));
  }
  if (gate_up_bias.has_value()) fits("gate_up_bias", *gate_up_bias, {experts, both});
  if (down_bias.has_value()) fits("down_bias", *down_bias, {experts, features});
  check_update("gate_up", updates.gate_up_a, updates.gate_up_b, experts, features, both);
  check_update("down", updates.down_a, updates.down_b, experts, hidden, features);
  layers::check_dropout(kMoeExpertsOp, updates.dropout, updates.seed, x.device());
  TORCH_CHECK(updates.dropout == 0 || updates.gate_up_a.has_value() || updates.down_a.has_value(),
              kMoeExpertsOp, ": dropout: expected 0 without LoRA, received ", updates.dropout);
}

Tensor ExpertUpdates::dropped(Backend backend, const Tensor& rows, bool is_down) const {
  if (dropout == 0) return rows;
  return layers::drop(backend, rows, is_down ? seed->add(1) : *seed, dropout);
}

ExpertSlots ExpertArguments::sorted() const {
  static auto sort = find<ExpertSlots(const Tensor&, int64_t)>("shoestring::moe_sort");
  return sort.call(index, sizes().experts.expect_int());
}

ExpertCodes::ExpertCodes(Backend backend, const Tensor& codes, const ExpertScales& scales,
                         const ExpertSizes& sizes, bool is_down, bool transposed)
    : experts(sizes.experts.expect_int()) {
  const int64_t features = sizes.features.expect_int(), hidden = sizes.hidden.expect_int();
  const int64_t out = is_down ? features : 2 * hidden, in = is_down ? hidden : features;
  rows = transposed ? in : out;
  columns = transposed ? out : in;
  const OptionalTensor& absmax = is_down ? scales.down_absmax : scales.gate_up_absmax;
  if (!absmax.has_value()) return;
  reader.emplace(backend, kMoeExpertsOp, codes, *absmax, is_down ? scales.down_nested : scales.gate_up_nested,
                 scales.quant_type, scales.block(columns).expect_int());
}

ExpertTokens::ExpertTokens(const Tensor& order, const Tensor& weight, at::ScalarType sums)
    : rows(at::floor_divide(order, weight.size(-1))),
      scale(weight.reshape({-1}).to(sums).index_select(0, order)) {}

namespace {

ExpertStack stack_of(const Tensor& weight, const ExpertCodes& codes, bool transposed,
                     at::ScalarType compute) {
  if (!codes.reader.has_value()) return {weight, transposed, compute};
  return {*codes.reader, codes.experts, codes.rows, codes.columns, transposed};
}

// The weights of a layer.
struct Weights {
  template <class Arguments>  // ExpertArguments or ExpertBackward
  Weights(const Arguments& from, at::ScalarType compute)
      : hidden(sizes_of(from.x, from.gate_up, from.scales, from.options.transposed).hidden.expect_int()),
        gate_up(stack_of(from.gate_up, {Backend::kCpu, from, /*is_down=*/false}, from.options.transposed,
                         compute)),
        down(stack_of(from.down, {Backend::kCpu, from, /*is_down=*/true}, from.options.transposed, compute)),
        gate_up_update(from.updates.gate_up_a, from.updates.gate_up_b, from.updates.scaling, compute),
        down_update(from.updates.down_a, from.updates.down_b, from.updates.scaling, compute) {}

  int64_t hidden;
  ExpertStack gate_up, down;
  ExpertUpdate gate_up_update, down_update;
};

// The stacks of the two layers of experts, which may be away.
template <class Arguments>  // ExpertArguments or ExpertBackward
BroughtExperts bring_gate_up(const Arguments& from, c10::ArrayRef<int64_t> offsets) {
  const auto& [scales, updates] = std::tie(from.scales, from.updates);
  return {offsets, {from.gate_up, scales.gate_up_absmax, updates.gate_up_a, updates.gate_up_b}};
}
template <class Arguments>
BroughtExperts bring_down(const Arguments& from, c10::ArrayRef<int64_t> offsets) {
  const auto& [scales, updates] = std::tie(from.scales, from.updates);
  return {offsets, {from.down, scales.down_absmax, updates.down_a, updates.down_b}};
}

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

// Returns the rows that A of an update reads, which are `rows` without dropout.
gemm::Slots dropped_slots(const ExpertUpdates& updates, const ExpertUpdate& update, gemm::Slots rows,
                          bool is_down) {
  if (update.defined()) rows.matrix = updates.dropped(Backend::kCpu, rows.matrix, is_down);
  return rows;
}

// ---- the operators on the CPU

ExpertResults experts_cpu(const ExpertArguments& arguments) {
  arguments.check();
  const auto [order, inverse, offsets] =
      sort_slots(kMoeExpertsOp, arguments.index, arguments.sizes().experts.expect_int());
  const Tensor x = as_matrix(arguments.x).to(arguments.type());
  const auto compute = gemm::product_type(x), sums = compute_type(x);
  const auto bounds = numbers(offsets);
  const BroughtExperts gate_up = bring_gate_up(arguments, bounds), down = bring_down(arguments, bounds);
  const Weights weights(arguments, compute);
  const ExpertTokens tokens(order, arguments.weight, sums);
  const auto bias = [&](const OptionalTensor& b) {
    return b.has_value() ? b->to(sums).contiguous() : Tensor();
  };
  const gemm::Slots inputs{gatherable(x, compute), numbers(tokens.rows), true};
  const Tensor h = in_huge_pages(at::empty({order.size(0), 2 * weights.hidden}, x.options()));
  gate_up.wait();
  const auto low = [&](const ExpertUpdate& update, const gemm::Slots& rows, bool is_down) {
    return update.low(dropped_slots(arguments.updates, update, rows, is_down), bounds);
  };
  gemm::multiply_slots(compute, h, inputs, bounds, weights.gate_up.forward(), bias(arguments.gate_up_bias),
                       weights.gate_up_update.forward(low(weights.gate_up_update, inputs, false)));
  const Tensor a = in_huge_pages(at::empty({order.size(0), weights.hidden}, x.options()));
  gate_rows(arguments.options.gate(), h, bounds.back(), a);
  const Tensor out = in_huge_pages(at::empty(x.sizes(), x.options()));
  down.wait();
  gemm::sum_slots(compute, out, a, numbers(tokens.rows), bounds, weights.down.forward(),
                  bias(arguments.down_bias), tokens.scale,
                  weights.down_update.forward(low(weights.down_update, {a}, true)));
  return {out.view(arguments.x.sizes()), h, order, offsets};
}

// Adds to the gradient of each slot's weight that of the bias: the product of the token's gradient and the
// bias of the slot's expert.
void add_along_bias(const Tensor& along, const Tensor& grad, const Tensor& rows,
                    c10::ArrayRef<int64_t> offsets, const OptionalTensor& given) {
  const Tensor bias = given->to(along.scalar_type()).contiguous();
  const auto tokens = numbers(rows);
  const int64_t features = grad.size(1), step = grad.stride(0);
  // Calls multiply(row of grad, row of the bias, element of `along`) for the slots.
  const auto for_each_slot = [&](const auto* from, const auto* of_experts, auto* to, const auto& multiply) {
    at::parallel_for(offsets.front(), offsets.back(), row_grain(features * grad.element_size()),
                     [&](int64_t first, int64_t last) {
                       auto e = std::upper_bound(offsets.begin(), offsets.end(), first) - offsets.begin() - 1;
                       for (int64_t s = first; s < last; ++s) {
                         while (s >= offsets[e + 1]) ++e;
                         multiply(from + tokens[s] * step, of_experts + e * features, to + s);
                       }
                     });
  };
  if (grad.scalar_type() == at::kDouble) {
    return for_each_slot(grad.const_data_ptr<double>(), bias.const_data_ptr<double>(),
                         along.mutable_data_ptr<double>(),
                         [&](const double* a, const double* b, double* sum) {
                           *sum = std::inner_product(a, a + features, b, *sum);
                         });
  }
  const auto run = [&](auto kernel, const auto* from) {
    for_each_slot(from, bias.const_data_ptr<float>(), along.mutable_data_ptr<float>(),
                  [&](const auto* a, const float* b, float* sum) {
                    kernel(a, features, 1, b, 1, features, sum, 1, /*alpha=*/1, /*beta=*/1);
                  });
  };
  const auto& kernels = cpu::skinny_gemm();
  const void* data = grad.const_data_ptr();
  if (grad.scalar_type() == at::kFloat) return run(kernels.multiply_float, static_cast<const float*>(data));
  run(grad.scalar_type() == at::kBFloat16 ? kernels.multiply_bf16 : kernels.multiply_fp16,
      static_cast<const uint16_t*>(data));
}

ExpertGradients experts_backward_cpu(const ExpertBackward& arguments) {
  const auto& wants = arguments.output_mask;
  const bool transposed = arguments.options.transposed;
  const Tensor x = as_matrix(arguments.x), h = arguments.hidden;
  const auto compute = gemm::product_type(x), sums = compute_type(x);
  const Tensor grad = gatherable(as_matrix(arguments.grad).to(x.scalar_type()), compute);
  const auto offsets = numbers(arguments.offsets);
  const BroughtExperts down = bring_down(arguments, offsets), gate_up = bring_gate_up(arguments, offsets);
  const Weights weights(arguments, compute);
  const ExpertUpdate &gate_up_update = weights.gate_up_update, &down_update = weights.down_update;
  const ExpertTokens tokens(arguments.order, arguments.weight, sums);
  const gemm::Slots inputs{gatherable(x, compute), numbers(tokens.rows), true},
      upstream{grad, numbers(tokens.rows), true};
  ExpertGradients gradients;

  // The gradient of a without the weight; then the weighted a.
  const Tensor a = in_huge_pages(at::empty({h.size(0), weights.hidden}, h.options())),
               grad_h = in_huge_pages(at::empty_like(h));
  down.wait();
  const Tensor grad_low_down = down_update.grad_low(upstream, offsets);
  const ExpertUpdates& updates = arguments.updates;
  const bool drops =
      updates.dropout > 0;  // the products with A have masks then, so they are added afterwards
  gemm::multiply_slots(compute, a, upstream, offsets, weights.down.backward(), {},
                       drops ? gemm::SlotTerm() : down_update.backward(grad_low_down));
  if (drops && down_update.defined()) {
    const Tensor added = at::empty_like(a);
    gemm::multiply_slots(compute, added, {grad_low_down}, offsets, down_update.backward({}).b);
    a.add_(updates.dropped(Backend::kCpu, added, /*is_down=*/true));
  }
  const Tensor along =
      gate_rows_backward(arguments.options.gate(), h, tokens.scale, offsets.back(), a, grad_h);
  if (wants[kGradWeight]) {
    if (arguments.down_bias.has_value())
      add_along_bias(along, grad, tokens.rows, offsets, arguments.down_bias);
    const Tensor by_slot = at::empty_like(along);
    by_slot.index_copy_(0, arguments.order, along);
    gradients.all[kGradWeight] = by_slot.view(arguments.weight.sizes()).to(arguments.weight.scalar_type());
  }
  const auto by_expert = [&](const Tensor& weight, const gemm::Slots& rows, const gemm::Slots& columns) {
    const Tensor result = empty_results(weight.sizes(), weight, weight.scalar_type(), compute);
    gemm::multiply_by_group(compute, result, rows, columns, offsets);
    return result.to(weight.scalar_type());
  };
  const auto of_stack = [&](const Tensor& weight, const gemm::Slots& in, const gemm::Slots& out) {
    return by_expert(weight, transposed ? in : out, transposed ? out : in);
  };
  if (wants[kGradDown]) gradients.all[kGradDown] = of_stack(arguments.down, {a}, upstream);
  if (wants[kGradDownBias])
    gradients.all[kGradDownBias] = sum_by_expert(grad, offsets, numbers(tokens.rows), tokens.scale);
  if (wants[kGradGateUp]) gradients.all[kGradGateUp] = of_stack(arguments.gate_up, inputs, {grad_h});
  if (wants[kGradGateUpBias]) gradients.all[kGradGateUpBias] = sum_by_expert(grad_h, offsets);
  const gemm::Slots low_in = dropped_slots(updates, gate_up_update, inputs, /*is_down=*/false);
  const gemm::Slots low_a = dropped_slots(updates, down_update, {a}, /*is_down=*/true);
  if (wants[kGradDownA]) gradients.all[kGradDownA] = by_expert(*updates.down_a, {grad_low_down}, low_a);
  if (wants[kGradDownB])
    gradients.all[kGradDownB] = by_expert(*updates.down_b, upstream, {down_update.low(low_a, offsets)});
  gate_up.wait();
  if (wants[kGradGateUpB])
    gradients.all[kGradGateUpB] =
        by_expert(*updates.gate_up_b, {grad_h}, {gate_up_update.low(low_in, offsets)});
  if (!wants[kGradX] && !wants[kGradGateUpA]) return gradients;
  const Tensor grad_low = gate_up_update.grad_low({grad_h}, offsets);
  if (wants[kGradGateUpA]) gradients.all[kGradGateUpA] = by_expert(*updates.gate_up_a, {grad_low}, low_in);
  if (wants[kGradX]) {
    const Tensor grad_x = in_huge_pages(at::empty(x.sizes(), x.options()));
    gemm::sum_slots(compute, grad_x, grad_h, numbers(tokens.rows), offsets, weights.gate_up.backward(), {},
                    {}, drops ? gemm::SlotTerm() : gate_up_update.backward(grad_low));
    if (drops && gate_up_update.defined()) {
      const Tensor added = at::empty_like(grad_x);
      gemm::sum_slots(compute, added, grad_low, numbers(tokens.rows), offsets, gate_up_update.backward({}).b);
      grad_x.add_(updates.dropped(Backend::kCpu, added, /*is_down=*/false));
    }
    gradients.all[kGradX] = grad_x.view(arguments.x.sizes());
  }
  return gradients;
}

// ---- registration

ExpertResults experts_meta(const ExpertArguments& arguments) {
  arguments.check();
  const auto options = arguments.x.options().dtype(arguments.type());
  const auto slots = arguments.index.sym_numel();
  const auto sizes = arguments.sizes();
  return {at::empty_symint(arguments.x.sym_sizes(), options),
          at::empty_symint({slots, 2 * sizes.hidden}, options),
          at::empty_symint({slots}, arguments.index.options()),
          at::empty_symint({sizes.experts + 1}, arguments.index.options())};
}

ExpertGradients experts_backward_meta(const ExpertBackward& arguments) {
  ExpertGradients gradients;
  const auto like = [&](ExpertGradient i, const OptionalTensor& t) {
    if (arguments.output_mask[i]) gradients.all[i] = at::empty_symint(t->sym_sizes(), t->options());
  };
  const auto [experts, features, hidden] =
      sizes_of(arguments.x, arguments.gate_up, arguments.scales, arguments.options.transposed);
  const auto sums = [&](ExpertGradient i, const c10::SymInt& columns) {
    if (!arguments.output_mask[i]) return;
    gradients.all[i] =
        at::empty_symint({experts, columns}, arguments.x.options().dtype(compute_type(arguments.x)));
  };
  like(kGradX, arguments.x);
  like(kGradWeight, arguments.weight);
  like(kGradGateUp, arguments.gate_up);
  like(kGradDown, arguments.down);
  sums(kGradGateUpBias, 2 * hidden);
  sums(kGradDownBias, features);
  like(kGradGateUpA, arguments.updates.gate_up_a);
  like(kGradGateUpB, arguments.updates.gate_up_b);
  like(kGradDownA, arguments.updates.down_a);
  like(kGradDownB, arguments.updates.down_b);
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
  // A stack whose absmax is given has the codes and scales of a quantised weight (quantization/schema.cpp)
  // with the shape above, and no gradient. With gate_up_absmax, hidden_features is the hidden size. The
  // matrix of an expert is a number of whole blocks. For 'int8', a row shares a scale, whatever block_size.
  // - gate_up_a (experts, rank, features) and gate_up_b (experts, 2 hidden, rank), down_a (experts, rank,
  // hidden) and down_b (experts, features, rank): scaling * b_e a_e is added to the weight of expert e,
  // without computing the product of b_e and a_e. With dropout, a reads rows of which each element is dropped
  // with this probability: x, and the gated features. seed: see seeded_dropout.
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
