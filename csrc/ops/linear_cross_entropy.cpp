#include "ops/linear_cross_entropy.h"

#include <cmath>
#include <limits>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <shoestring/ops.h>

#include "ops/base_weight.h"

namespace shoestring {
namespace cross_entropy {
namespace {

// `to`, but without the call where it would return t itself, which an operator below autograd must not.
Tensor as(const Tensor& t, at::ScalarType dtype) { return t.scalar_type() == dtype ? t : t.to(dtype); }

}  // namespace

void push(torch::jit::Stack* stack, const c10::OperatorHandle& op, const Result& r, const Tensor& hidden) {
  const auto compute = hidden.options().dtype(compute_type(hidden));
  const auto or_empty = [](const Tensor& t, at::TensorOptions options) {
    return t.defined() ? t : at::empty({0}, options);
  };
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, r.loss, r.lse, or_empty(r.entropy, compute), or_empty(r.argmax, compute.dtype(at::kLong)));
  for (const Tensor& gradient : r.gradients) torch::jit::push(*stack, or_empty(gradient, hidden.options()));
}

Call::Call(const BoxedArguments& a, bool stats)
    : Head(a),
      target(a.tensor("target")),
      class_weights(a.optional("class_weights")),
      token_weights(a.optional("token_weights")),
      weight_grad(a.optional("weight_grad")),
      reduction(a["reduction"].toStringRef()),
      hard_fraction(a.number("hard_fraction")),
      grad_scale(a["grad_scale"].toOptional<double>()),
      stats(stats) {
  check(kOp);
  check_target(kOp, *this, target);
  check_weights("class_weights", class_weights, {vocab}, hidden);
  check_weights("token_weights", token_weights, target.sym_sizes(), hidden);
  TORCH_CHECK(!grad_scale || (weight_grad && std::isfinite(*grad_scale) && *grad_scale != 0), kOp,
              ": grad_scale: expected None, or with weight_grad a number that is not 0, received ", *grad_scale);
  TORCH_CHECK(!grad_scale || reduction != "none", kOp,
              ": grad_scale: expected None with reduction='none', whose upstream gradients are not one number");
  TORCH_CHECK(hard_fraction > 0 && hard_fraction <= 1, kOp, ": hard_fraction: expected a number in (0, 1], received ",
              hard_fraction);
  head::check_reduction(kOp, reduction);
  for (const char* name : kOptions) options.emplace_back(name, a[name]);
  if (!a["shift"].toBool()) return;
  TORCH_CHECK(target.dim() >= 1, kOp, ": shift: expected tokens in a sequence, received a single one");
  // The last token of a sequence has none to predict; hidden stays as it lies.
  Tensor next = at::full_like(target, ignore_index(), at::MemoryFormat::Contiguous);
  const auto count = target.sym_size(-1);
  if (count > 1) next.slice_symint(-1, 0, count - 1).copy_(target.slice_symint(-1, 1));
  target = next;
}

// How many count is known on the device only, so the smallest loss that is kept is looked up among all, sorted; and so
// are its equals kept.
void keep_hardest(Call& call) {
  if (call.hard_fraction == 1 || call.target.sym_numel() == 0) return;
  const c10::Scalar ignore_index = call.ignore_index();
  const Tensor ignored = call.target.eq(ignore_index);
  const bool stats = std::exchange(call.stats, false);
  Tensor loss = rows(call, {}, {}).loss;
  call.stats = stats;
  if (call.token_weights) loss = loss * *call.token_weights;
  loss = loss.masked_fill(ignored, -std::numeric_limits<double>::infinity());
  const Tensor sorted = std::get<0>(loss.reshape_symint({loss.sym_numel()}).sort(/*dim=*/0, /*descending=*/true));
  const Tensor kept = ignored.logical_not().sum(at::kDouble).mul(call.hard_fraction).ceil().sub(1).clamp_min(0);
  const Tensor least = sorted.index_select(0, kept.to(at::kLong).reshape({1}));
  call.target = call.target.masked_fill(loss.ge(least.squeeze(0)).logical_not(), ignore_index);
}

Reduction::Reduction(const Call& call) : scalar(call.reduction != "none"), copies(call.stats) {
  const Tensor counted = call.target.ne(call.ignore_index());
  if (call.token_weights) {
    weights = as(*call.token_weights, compute_type(call.hidden)).masked_fill(counted.logical_not(), 0);
  }
  if (call.reduction != "mean") return;
  Tensor each = weights.defined() ? weights : counted;
  if (call.class_weights) {  // a target out of range is not for here to find
    const Tensor index = call.target.masked_fill(counted.logical_not(), 0).clamp_min(0);
    const Tensor within = at::minimum(index, at::scalar_tensor(call.vocab - 1, index.options()));
    each = each * at::take(*call.class_weights, within);
  }
  total = each.sum(at::kDouble);
}

Tensor Reduction::apply(const Tensor& loss) const {
  Tensor weighted = weights.defined() ? loss * weights : copies && !scalar ? loss.clone() : loss;
  if (!scalar) return weighted;
  weighted = weighted.sum(at::kDouble);
  return as(total.defined() ? weighted / total : weighted, loss.scalar_type());  // NaN for a mean over nothing
}

Tensor Reduction::factor(at::ScalarType dtype) const {
  if (!total.defined()) return weights.defined() ? weights : Tensor();
  const Tensor share = total.reciprocal();
  if (!weights.defined()) return as(share, dtype);
  return as(weights * share, dtype).masked_fill(weights.eq(0), 0);  // 0 / 0
}

Result rows(const Call& call, const std::array<Tensor, 3>& upstream, const Mask& mask) {
  NamedArguments arguments = call.options;
  call.append_to(arguments);
  arguments.insert(arguments.end(), {{"target", flat(call, call.target)},
                                     {"class_weights", call.class_weights},
                                     {"weight_grad", call.weight_grad},
                                     {"averaged", call.reduction == "mean"},
                                     {"stats", call.stats},
                                     {"output_mask", head::list_of(mask)}});
  const char* factors[] = {"grad_loss", "grad_lse", "grad_entropy"};
  for (int i = 0; i < 3; ++i) {
    if (upstream[i].defined()) arguments.emplace_back(factors[i], flat(call, upstream[i]));
  }
  const auto out = call_by_name("shoestring::linear_cross_entropy_rows", arguments);
  const auto shaped = [&](int i) { return out[i].toTensor().view_symint(call.target.sym_sizes()); };
  Result r{shaped(0), shaped(1), call.stats ? shaped(2) : Tensor(), call.stats ? shaped(3) : Tensor(), {}};
  for (int i = 0; i < kInputs; ++i) {
    if (mask[i] && !(i == kWeight && call.weight_grad)) r.gradients[i] = out[4 + i].toTensor();
  }
  if (mask[kHidden]) r.gradients[kHidden] = r.gradients[kHidden].view_symint(call.hidden.sym_sizes());
  if (mask[kLow]) r.gradients[kLow] = r.gradients[kLow].view_symint(call.low->sym_sizes());
  return r;
}

}  // namespace cross_entropy

namespace {

using at::Tensor;
using cross_entropy::Call;
using cross_entropy::Reduction;
using cross_entropy::Result;

Result on_meta(const cross_entropy::Problem& p) {
  const auto compute = p.hidden.options().dtype(compute_type(p.hidden));
  const auto each = [&](at::TensorOptions options) { return at::empty_symint(p.target.sym_sizes(), options); };
  Result r{each(compute), each(compute), p.stats ? each(compute) : Tensor(),
           p.stats ? each(compute.dtype(at::kLong)) : Tensor(), {}};
  const auto inputs = p.inputs();
  for (int i = 0; i < cross_entropy::kInputs; ++i) {
    if (!p.mask[i] || (i == cross_entropy::kWeight && p.weight_grad)) continue;
    r.gradients[i] = at::empty_symint(inputs[i]->sym_sizes(), inputs[i]->options());
  }
  return r;
}

// Without gradients the operators are the same on every device.
template <bool kStats>
void without_gradients(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call(BoxedArguments(op, *stack), kStats);
  cross_entropy::keep_hardest(call);
  const Result r = cross_entropy::rows(call, {}, {});
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, Reduction(call).apply(r.loss));
  if constexpr (kStats) torch::jit::push(*stack, r.loss, r.lse, r.entropy, r.argmax);
}

TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("linear_cross_entropy_rows", torch::CppFunction::makeFromBoxedFunction<&cross_entropy::boxed<on_meta>>());
}
TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  m.impl("linear_cross_entropy", torch::CppFunction::makeFromBoxedFunction<&without_gradients<false>>());
  m.impl("linear_cross_entropy_with_stats", torch::CppFunction::makeFromBoxedFunction<&without_gradients<true>>());
}

torch::jit::Stack call(const char* op, const Tensor& hidden, const Tensor& weight, const Tensor& target,
                       const std::optional<Tensor>& bias, const LinearCrossEntropyOptions& o) {
  return call_by_name(op, {{"hidden", hidden},
                           {"weight", weight},
                           {"target", target},
                           {"bias", bias},
                           {"ignore_index", o.ignore_index()},
                           {"reduction", o.reduction()},
                           {"label_smoothing", o.label_smoothing()},
                           {"softcap", o.softcap()},
                           {"logit_scale", o.logit_scale()},
                           {"z_loss", o.z_loss()},
                           {"filter_eps", o.filter_eps()},
                           {"class_weights", o.class_weights()},
                           {"token_weights", o.token_weights()},
                           {"shift", o.shift()},
                           {"hard_fraction", o.hard_fraction()},
                           {"low", o.low()},
                           {"up", o.up()},
                           {"absmax", o.absmax()},
                           {"nested", o.nested()},
                           {"quant_type", o.quant_type()},
                           {"block_size", o.block_size()},
                           {"weight_grad", o.weight_grad()},
                           {"grad_scale", o.grad_scale()},
                           {"workspace_mb", o.workspace_mb()}});
}

}  // namespace

Tensor linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& target,
                            const std::optional<Tensor>& bias, const LinearCrossEntropyOptions& options) {
  return call("shoestring::linear_cross_entropy", hidden, weight, target, bias, options)[0].toTensor();
}

LinearCrossEntropyStats linear_cross_entropy_with_stats(const Tensor& hidden, const Tensor& weight, const Tensor& target,
                                                        const std::optional<Tensor>& bias,
                                                        const LinearCrossEntropyOptions& options) {
  const auto out = call("shoestring::linear_cross_entropy_with_stats", hidden, weight, target, bias, options);
  return {out[0].toTensor(), out[1].toTensor(), out[2].toTensor(), out[3].toTensor(), out[4].toTensor()};
}

}  // namespace shoestring
