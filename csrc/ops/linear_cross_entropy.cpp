#include "ops/linear_cross_entropy.h"

#include <cmath>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <shoestring/ops.h>

#include "ops/base_weight.h"

namespace shoestring {
namespace cross_entropy {
namespace {

// A tensor for each class or token: any floating type, or that of the call's loss.
void check_weights(const char* name, const OptionalTensor& weights, c10::SymIntArrayRef shape, const Tensor& hidden) {
  if (!weights) return;
  TORCH_CHECK(weights->sym_sizes() == shape && at::isFloatingType(weights->scalar_type()) &&
                  weights->device() == hidden.device(),
              kOp, ": ", name, ": expected a floating tensor of shape ", shape, " on ", hidden.device(), ", received ",
              weights->scalar_type(), " ", weights->sym_sizes(), " on ", weights->device());
}

void check_factor(const char* name, const OptionalTensor& factor, const Tensor& target) {
  TORCH_CHECK(!factor || factor->dim() == 0 || factor->sym_sizes() == target.sym_sizes(), kOp, ": ", name,
              ": expected shape () or ", target.sym_sizes(), ", received ", factor->sym_sizes());
}

void check_tensors(const Tensor& hidden, const Tensor& weight, const Tensor& target, const OptionalTensor& bias) {
  TORCH_CHECK(hidden.dim() >= 1, kOp, ": hidden: expected shape (..., features), received a scalar");
  TORCH_CHECK(weight.dim() == 2 && weight.sym_size(1) == hidden.sym_size(-1), kOp, ": weight: expected shape (vocab, ",
              hidden.sym_size(-1), "), features as in hidden, received ", weight.sym_sizes());
  TORCH_CHECK(target.sym_sizes() == hidden.sym_sizes().slice(0, hidden.dim() - 1), kOp,
              ": target: expected hidden's shape without its last dimension, ",
              hidden.sym_sizes().slice(0, hidden.dim() - 1), ", received ", target.sym_sizes());
  TORCH_CHECK(target.scalar_type() == at::kLong, kOp, ": target: expected int64, received ", target.scalar_type(),
              "; call target.long()");
  TORCH_CHECK(at::isFloatingType(hidden.scalar_type()), kOp, ": hidden: expected fp32, fp64, bf16 or fp16, received ",
              hidden.scalar_type());
  TORCH_CHECK(weight.scalar_type() == hidden.scalar_type(), kOp, ": weight: expected hidden's dtype, ",
              hidden.scalar_type(), ", received ", weight.scalar_type());
  TORCH_CHECK(weight.device() == hidden.device() && target.device() == hidden.device(), kOp,
              ": weight and target: expected hidden's device, ", hidden.device(), ", received ", weight.device(), " and ",
              target.device());
  if (!bias) return;
  TORCH_CHECK(bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), kOp, ": bias: expected shape (",
              weight.sym_size(0), "), received ", bias->sym_sizes());
  TORCH_CHECK(bias->scalar_type() == hidden.scalar_type() && bias->device() == hidden.device(), kOp,
              ": bias: expected hidden's dtype and device, ", hidden.scalar_type(), " on ", hidden.device(), ", received ",
              bias->scalar_type(), " on ", bias->device());
}

double finite(const BoxedArguments& arguments, const char* name, const char* expected, bool (*holds)(double)) {
  const double x = arguments.number(name);
  TORCH_CHECK(std::isfinite(x) && holds(x), kOp, ": ", name, ": expected ", expected, ", received ", x);
  return x;
}

// `to`, but without the call where it would return t itself, which an operator below autograd must not.
Tensor as(const Tensor& t, at::ScalarType dtype) { return t.scalar_type() == dtype ? t : t.to(dtype); }

Mask mask_of(const c10::IValue& value) {
  const auto list = value.toBoolList();
  return {list.get(0), list.get(1), list.get(2)};
}

}  // namespace

Problem::Problem(const BoxedArguments& a)
    : hidden(a.tensor("hidden")),
      weight(a.tensor("weight")),
      target(a.tensor("target")),
      bias(a.optional("bias")),
      class_weights(a.optional("class_weights")),
      grad_loss(a.optional("grad_loss")),
      grad_lse(a.optional("grad_lse")),
      grad_entropy(a.optional("grad_entropy")),
      ignore_index(a["ignore_index"].toInt()),
      label_smoothing(finite(a, "label_smoothing", "a number in [0, 1)", [](double x) { return x >= 0 && x < 1; })),
      softcap(finite(a, "softcap", "0 (none) or a positive number", [](double x) { return x >= 0; })),
      logit_scale(finite(a, "logit_scale", "a number that is not 0", [](double x) { return x != 0; })),
      z_loss(finite(a, "z_loss", "a number of at least 0", [](double x) { return x >= 0; })),
      averaged(a["averaged"].toBool()),
      stats(a["stats"].toBool()),
      workspace_mb(a["workspace_mb"].toInt()),
      mask(mask_of(a["output_mask"])) {
  check_tensors(hidden, weight, target, bias);
  TORCH_CHECK(hidden.dim() == 2, kOp, "_rows: hidden: expected shape (tokens, features), received ", hidden.sym_sizes());
  check_weights("class_weights", class_weights, weight.sym_sizes().slice(0, 1), hidden);
  check_factor("grad_loss", grad_loss, target);
  check_factor("grad_lse", grad_lse, target);
  check_factor("grad_entropy", grad_entropy, target);
  TORCH_CHECK(workspace_mb >= 0, kOp, ": workspace_mb: expected MiB, or 0 for the device's default, received ",
              workspace_mb);
}

void push(torch::jit::Stack* stack, const c10::OperatorHandle& op, const Result& r, const Tensor& hidden) {
  const auto compute = hidden.options().dtype(compute_type(hidden));
  const auto or_empty = [](const Tensor& t, at::TensorOptions options) {
    return t.defined() ? t : at::empty({0}, options);
  };
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, r.loss, r.lse, or_empty(r.entropy, compute), or_empty(r.argmax, compute.dtype(at::kLong)),
                   or_empty(r.grad_hidden, hidden.options()), or_empty(r.grad_weight, hidden.options()),
                   or_empty(r.grad_bias, hidden.options()));
}

Call::Call(const BoxedArguments& a, bool stats)
    : hidden(a.tensor("hidden")),
      weight(a.tensor("weight")),
      target(a.tensor("target")),
      bias(a.optional("bias")),
      class_weights(a.optional("class_weights")),
      token_weights(a.optional("token_weights")),
      reduction(a["reduction"].toStringRef()),
      stats(stats) {
  check_tensors(hidden, weight, target, bias);
  check_weights("class_weights", class_weights, weight.sym_sizes().slice(0, 1), hidden);
  check_weights("token_weights", token_weights, target.sym_sizes(), hidden);
  TORCH_CHECK(reduction == "mean" || reduction == "sum" || reduction == "none", kOp,
              ": reduction: expected 'mean', 'sum' or 'none', received '", reduction, "'");
  for (const char* name : kOptions) options.emplace_back(name, a[name]);
  if (!a["shift"].toBool()) return;
  TORCH_CHECK(target.dim() >= 1, kOp, ": shift: expected tokens in a sequence, received a single one");
  // The last token of a sequence has none to predict; hidden stays as it lies.
  Tensor next = at::full_like(target, a["ignore_index"].toInt(), at::MemoryFormat::Contiguous);
  const auto count = target.sym_size(-1);
  if (count > 1) next.slice_symint(-1, 0, count - 1).copy_(target.slice_symint(-1, 1));
  target = next;
}

Reduction::Reduction(const Call& call) : scalar(call.reduction != "none"), copies(call.stats) {
  const Tensor counted = call.target.ne(call.options[0].second.toInt());
  if (call.token_weights) {
    weights = as(*call.token_weights, compute_type(call.hidden)).masked_fill(counted.logical_not(), 0);
  }
  if (call.reduction != "mean") return;
  Tensor each = weights.defined() ? weights : counted;
  if (call.class_weights) {  // a target out of range is not for here to find
    const Tensor index = call.target.masked_fill(counted.logical_not(), 0).clamp_min(0);
    const Tensor within = at::minimum(index, at::scalar_tensor(call.weight.sym_size(0) - 1, index.options()));
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
  c10::SymInt tokens = 1;
  for (const auto& size : call.target.sym_sizes()) tokens *= size;
  const auto flat = [&](const Tensor& t) -> c10::IValue {
    if (!t.defined()) return {};
    return t.dim() == 0 && call.target.dim() != 0 ? t : t.reshape_symint({tokens});
  };
  NamedArguments arguments = call.options;
  arguments.emplace_back("hidden", call.hidden.reshape_symint({tokens, call.hidden.sym_size(-1)}));
  arguments.emplace_back("weight", call.weight);
  arguments.emplace_back("target", call.target.reshape_symint({tokens}));
  arguments.emplace_back("bias", call.bias);
  arguments.emplace_back("class_weights", call.class_weights);
  arguments.emplace_back("grad_loss", flat(upstream[0]));
  arguments.emplace_back("grad_lse", flat(upstream[1]));
  arguments.emplace_back("grad_entropy", flat(upstream[2]));
  arguments.emplace_back("averaged", call.reduction == "mean");
  arguments.emplace_back("stats", call.stats);
  arguments.emplace_back("output_mask", c10::List<bool>({mask[0], mask[1], mask[2]}));
  const auto out = call_by_name("shoestring::linear_cross_entropy_rows", arguments);
  const auto shaped = [&](int i) { return out[i].toTensor().view_symint(call.target.sym_sizes()); };
  const auto wanted = [&](int i) { return mask[i] ? out[4 + i].toTensor() : Tensor(); };
  return {shaped(0),
          shaped(1),
          call.stats ? shaped(2) : Tensor(),
          call.stats ? shaped(3) : Tensor(),
          mask[0] ? out[4].toTensor().view_symint(call.hidden.sym_sizes()) : Tensor(),
          wanted(1),
          wanted(2)};
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
  return {each(compute),
          each(compute),
          p.stats ? each(compute) : Tensor(),
          p.stats ? each(compute.dtype(at::kLong)) : Tensor(),
          p.mask[0] ? at::empty_like(p.hidden, at::MemoryFormat::Contiguous) : Tensor(),
          p.mask[1] ? at::empty_like(p.weight, at::MemoryFormat::Contiguous) : Tensor(),
          p.mask[2] ? at::empty_symint({p.weight.sym_size(0)}, p.weight.options()) : Tensor()};
}

// Without gradients the operators are the same on every device.
template <bool kStats>
void without_gradients(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Call call(BoxedArguments(op, *stack), kStats);
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
                           {"class_weights", o.class_weights()},
                           {"token_weights", o.token_weights()},
                           {"shift", o.shift()},
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
