// Linear layers of experts: the rows of each expert are multiplied by its own weight.

#include "experts/grouped_linear.h"

#include <array>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <torch/library.h>

#include <shoestring/experts/ops.h>

#include "core/arguments.h"
#include "core/autograd.h"
#include "core/call.h"
#include "core/device.h"
#include "core/tensors.h"
#include "experts/slots.h"
#include "gemm/grouped_product.h"
#include "gemm/linear.h"
#include "gemm/products.h"

namespace shoestring::experts {

void check_grouped_linear(const Tensor& x, const Tensor& weight, const Tensor& offsets,
                          const OptionalTensor& rows, const OptionalTensor& bias, OptionalType dtype) {
  const auto type = dtype.value_or(x.scalar_type());
  TORCH_CHECK(is_supported_float(type), kGroupedLinearOp, ": ", dtype.has_value() ? "dtype" : "x",
              ": expected fp32, fp64, bf16 or fp16, received ", type);
  TORCH_CHECK(x.dim() == 2, kGroupedLinearOp, ": x: expected shape (tokens, in_features), received ",
              x.sym_sizes());
  TORCH_CHECK(weight.dim() == 3 && weight.sym_size(2) == x.sym_size(1), kGroupedLinearOp,
              ": weight: expected shape (experts, out_features, ", x.sym_size(1), "), received ",
              weight.sym_sizes());
  const auto fits = [&](const char* name, const Tensor& t) {
    TORCH_CHECK(dtype.has_value() ? is_supported_float(t.scalar_type()) : t.scalar_type() == type,
                kGroupedLinearOp, ": ", name, ": expected ",
                dtype.has_value() ? "fp32, fp64, bf16 or fp16" : c10::toString(type), ", received ",
                t.scalar_type(),
                dtype.has_value() ? "" : "; pass dtype to multiply tensors of several dtypes");
    TORCH_CHECK(t.device() == x.device(), kGroupedLinearOp, ": ", name, ": expected a tensor on ", x.device(),
                ", received one on ", t.device());
  };
  const auto is_index = [&](const char* name, const Tensor& t) {
    TORCH_CHECK(t.scalar_type() == at::kLong && t.dim() == 1 && t.device() == x.device(), kGroupedLinearOp,
                ": ", name, ": expected int64 of one dimension on ", x.device(), ", received ", t.sym_sizes(),
                " of ", t.scalar_type(), " on ", t.device());
  };
  fits("x", x);
  fits("weight", weight);
  is_index("offsets", offsets);
  TORCH_CHECK(offsets.sym_size(0) == weight.sym_size(0) + 1, kGroupedLinearOp, ": offsets: expected ",
              weight.sym_size(0) + 1, " numbers, one more than experts, received ", offsets.sym_size(0));
  if (rows.has_value()) is_index("rows", *rows);
  if (!bias.has_value()) return;
  TORCH_CHECK(
      bias->dim() == 2 && bias->sym_size(0) == weight.sym_size(0) && bias->sym_size(1) == weight.sym_size(1),
      kGroupedLinearOp, ": bias: expected shape (", weight.sym_size(0), ", ", weight.sym_size(1),
      "), received ", bias->sym_sizes());
  fits("bias", *bias);
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Gradients = GroupedGradients;

// Checks the values of the offsets and rows, on the CPU.
void check_slots(const Tensor& offsets, const OptionalTensor& rows, int64_t tokens) {
  const int64_t slots = rows.has_value() ? rows->size(0) : tokens;
  int64_t before = 0;
  const auto* offset = offsets.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < offsets.size(0); before = offset[i++]) {
    TORCH_CHECK(offset[i] >= before && offset[i] <= slots, kGroupedLinearOp,
                ": offsets: expected ascending numbers from 0 to ", slots, ", the number of ",
                rows.has_value() ? "rows" : "rows of x", ", received ", offset[i], " after ", before);
  }
  if (!rows.has_value()) return;
  const auto* row = rows->const_data_ptr<int64_t>();
  for (int64_t i = 0; i < slots; ++i) {
    TORCH_CHECK(row[i] >= 0 && row[i] < tokens, kGroupedLinearOp, ": rows: expected numbers from 0 to ",
                tokens - 1, ", received ", row[i]);
  }
}

// The arguments of an operator on the CPU, whose slots were checked.
struct Call {
  Call(const Tensor& offsets, const OptionalTensor& rows, int64_t tokens)
      : offsets(offsets.contiguous()), rows(rows.has_value() ? rows->contiguous() : Tensor()) {
    check_slots(this->offsets, as_optional(this->rows), tokens);
  }

  c10::ArrayRef<int64_t> bounds() const { return numbers(offsets); }

  // Returns the slots that refer to the rows of x, or that are the rows of x.
  gemm::Slots slots(const Tensor& x) const {
    return {x, rows.defined() ? numbers(rows) : c10::ArrayRef<int64_t>(), rows.defined()};
  }

  Tensor offsets, rows;
};

Tensor grouped_linear_cpu(const Tensor& x, const Tensor& weight, const Tensor& offsets,
                          const OptionalTensor& rows, const OptionalTensor& bias, OptionalType dtype) {
  check_grouped_linear(x, weight, offsets, rows, bias, dtype);
  const Call call(offsets, rows, x.size(0));
  const Tensor rounded = x.to(dtype.value_or(x.scalar_type()));
  const auto compute = gemm::product_type(rounded);
  const gemm::Slots slots = call.slots(gatherable(rounded, compute));
  const BroughtExperts brought(call.bounds(), {weight});
  brought.wait();
  const Tensor weights = readable(weight, compute);
  const Tensor out =
      at::empty({call.rows.defined() ? call.rows.size(0) : x.size(0), weight.size(1)}, rounded.options());
  gemm::multiply_slots(
      compute, out, slots, call.bounds(),
      [&](int64_t e, int64_t first, int64_t last) { return weights[e].narrow(0, first, last - first).t(); },
      bias.has_value() ? bias->to(compute_type(rounded)).contiguous() : Tensor());
  return out;
}

Gradients grouped_linear_backward_cpu(const Tensor& grad_out, const OptionalTensor& x, const Tensor& weight,
                                      const Tensor& offsets, const OptionalTensor& rows, int64_t tokens,
                                      at::ScalarType dtype, at::ScalarType x_dtype, at::ScalarType bias_dtype,
                                      std::array<bool, 3> mask) {
  const Call call(offsets, rows, tokens);
  const Tensor upstream = grad_out.to(dtype);
  const auto compute = gemm::product_type(upstream);
  const Tensor grad = gatherable(upstream, compute);
  Tensor grad_x, grad_weight;
  if (mask[0]) {
    const BroughtExperts brought(call.bounds(), {weight});
    brought.wait();
    const Tensor weights = readable(weight, compute);
    const auto columns = [&](int64_t e, int64_t first, int64_t last) {
      return weights[e].narrow(1, first, last - first);
    };
    grad_x = empty_results({tokens, weight.size(2)}, grad, x_dtype, compute);
    call.rows.defined() ? gemm::sum_slots(compute, grad_x, grad, numbers(call.rows), call.bounds(), columns)
                        : gemm::multiply_slots(compute, grad_x, {grad}, call.bounds(), columns);
    grad_x = grad_x.to(x_dtype);
  }
  if (mask[1]) {
    grad_weight = empty_results(weight.sizes(), weight, weight.scalar_type(), compute);
    gemm::multiply_by_group(compute, grad_weight, {grad}, call.slots(gatherable(*x, compute)), call.bounds());
    grad_weight = grad_weight.to(weight.scalar_type());
  }
  return {grad_x, grad_weight, mask[2] ? sum_by_expert(grad, call.bounds()).to(bias_dtype) : Tensor()};
}

Tensor grouped_linear_meta(const Tensor& x, const Tensor& weight, const Tensor& offsets,
                           const OptionalTensor& rows, const OptionalTensor& bias, OptionalType dtype) {
  check_grouped_linear(x, weight, offsets, rows, bias, dtype);
  return at::empty_symint({rows.has_value() ? rows->sym_size(0) : x.sym_size(0), weight.sym_size(1)},
                          x.options().dtype(dtype.value_or(x.scalar_type())));
}

Gradients grouped_linear_backward_meta(const Tensor& grad_out, const OptionalTensor&, const Tensor& weight,
                                       const Tensor&, const OptionalTensor&, c10::SymInt tokens,
                                       at::ScalarType, at::ScalarType x_dtype, at::ScalarType bias_dtype,
                                       std::array<bool, 3> mask) {
  const auto options = grad_out.options();
  return {mask[0] ? at::empty_symint({tokens, weight.sym_size(2)}, options.dtype(x_dtype)) : Tensor(),
          mask[1] ? at::empty_symint(weight.sym_sizes(), weight.options()) : Tensor(),
          mask[2] ? at::empty_symint({weight.sym_size(0), weight.sym_size(1)}, options.dtype(bias_dtype))
                  : Tensor()};
}

// ---- autograd

Tensor call_grouped_linear(const Tensor& x, const Tensor& weight, const Tensor& offsets,
                           const OptionalTensor& rows, const OptionalTensor& bias, OptionalType dtype) {
  static auto op = find<decltype(grouped_linear_meta)>("shoestring::grouped_linear");
  return op.call(x, weight, offsets, rows, bias, dtype);
}

class GroupedLinear : public torch::autograd::Function<GroupedLinear> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const Tensor& offsets,
                        const OptionalTensor& rows, const OptionalTensor& bias, at::ScalarType type) {
    at::AutoDispatchBelowADInplaceOrView below;
    const Tensor rounded = x.scalar_type() == type ? x : x.to(type);
    Saved saved{weight.requires_grad() ? rounded : Tensor(), weight, offsets, rows.value_or(Tensor())};
    saved.type = type;
    saved.x_type = x.scalar_type();
    saved.bias_type = bias.has_value() ? bias->scalar_type() : type;
    saved.mask = {x.requires_grad(), weight.requires_grad(), wants_grad(bias)};
    saved.tokens = x.sym_size(0);
    save_fields(ctx, saved);
    return call_grouped_linear(rounded, weight, offsets, rows, bias, type);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    const auto saved = saved_fields<Saved>(ctx);
    at::AutoDispatchBelowADInplaceOrView below;
    static auto op = find<decltype(grouped_linear_backward_meta)>("shoestring::_grouped_linear_backward");
    const auto [grad_x, grad_weight, grad_bias] =
        op.call(upstream[0], as_optional(saved.x), saved.weight, saved.offsets, as_optional(saved.rows),
                saved.tokens, saved.type, saved.x_type, saved.bias_type, saved.mask);
    const variable_list g = once_differentiable(kGroupedLinearOp, {grad_x, grad_weight, grad_bias});
    return {g[0], g[1], {}, {}, g[2], {}};
  }

 private:
  struct Saved {
    Tensor x, weight, offsets, rows;  // x: rounded to `type`; saved only if the weight needs a gradient
    at::ScalarType type = at::kFloat, x_type = at::kFloat, bias_type = at::kFloat;
    std::array<bool, 3> mask{};
    c10::SymInt tokens = 0;

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      visit.each(self.x, self.weight, self.offsets, self.rows, self.type, self.x_type, self.bias_type,
                 self.mask, self.tokens);
    }
  };
};

Tensor grouped_linear_autograd(const Tensor& x, const Tensor& weight, const Tensor& offsets,
                               const OptionalTensor& rows, const OptionalTensor& bias, OptionalType dtype) {
  if (needs_grad(x, weight) || (at::GradMode::is_enabled() && wants_grad(bias)))
    return GroupedLinear::apply(x, weight, offsets, rows, bias, dtype.value_or(x.scalar_type()));
  at::AutoDispatchBelowADInplaceOrView below;
  return call_grouped_linear(x, weight, offsets, rows, bias, dtype);
}

template <c10::DeviceType device>
Tensor grouped_linear_autocast(const Tensor& x, const Tensor& weight, const Tensor& offsets,
                               const OptionalTensor& rows, const OptionalTensor& bias, OptionalType dtype) {
  c10::impl::ExcludeDispatchKeyGuard off(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  return call_grouped_linear(x, weight, offsets, rows, bias, gemm::autocast_type<device>(x, dtype));
}

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Multiplies rows by the weights of their experts: row s of the result is x[rows[s]] W_e^T + bias_e, where
  // offsets[e] <= s < offsets[e + 1]; without `rows`, x[s] W_e^T + bias_e. Other rows of the result are 0.
  // x (tokens, in), weight (experts, out, in), offsets (experts + 1) and rows (slots) int64, bias
  // (experts, out). dtype: as in linear. On the CPU, offsets that do not ascend within [0, slots], and rows
  // outside of [0, tokens), are errors. On CUDA, slots with such rows belong to no expert, and results are
  // undefined if the offsets do not ascend.
  m.def(R"(grouped_linear(Tensor x, Tensor weight, Tensor offsets, *, Tensor? rows=None, Tensor? bias=None,
      ScalarType? dtype=None) -> Tensor)");
  // Returns the gradients of x (tokens, in), weight and bias that output_mask selects; the others are
  // undefined. dtype is that of the products. x may be missing if the weight's gradient is not selected.
  m.def(R"(_grouped_linear_backward(Tensor grad_out, Tensor? x, Tensor weight, Tensor offsets, Tensor? rows,
      SymInt tokens, ScalarType dtype, ScalarType x_dtype, ScalarType bias_dtype, bool[3] output_mask) -> (
      Tensor, Tensor, Tensor))");
}
TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("grouped_linear", grouped_linear_cpu);
  m.impl("_grouped_linear_backward", grouped_linear_backward_cpu);
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("grouped_linear", grouped_linear_meta);
  m.impl("_grouped_linear_backward", grouped_linear_backward_meta);
}
TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl("grouped_linear", grouped_linear_autograd); }
const AutocastRules grouped_linear_rules([](torch::Library& m, auto device) {
  m.impl("grouped_linear", grouped_linear_autocast<device>);
});

}  // namespace
}  // namespace shoestring::experts

namespace shoestring {

at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& offsets,
                          const GroupedLinearOptions& options) {
  static auto op = find<decltype(experts::grouped_linear_meta)>("shoestring::grouped_linear");
  return op.call(x, weight, offsets, options.rows(), options.bias(), options.dtype());
}

}  // namespace shoestring
