#include "attention/attention.h"

#include <limits>

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <shoestring/ops.h>

#include "core/tensors.h"

namespace shoestring::attend {

namespace {

// Returns exp(sink - lse) * delta for each query, where exp(sink - lse) is the attention probability of the
// sink. Uses fp64, because the caller's sum of these products may cancel.
Tensor sink_rows(const Call& call, const Tensor& lse, const Tensor& delta) {
  return at::exp(call.sinks->to(at::kDouble).unsqueeze(-1).sub(lse)).mul_(delta);
}

}  // namespace

// The gradient of a sink is the sum over queries of -probability of the sink * delta, because a sink has no
// value vector.
Tensor sinks_gradient(const Call& call, const Tensor& lse, const Tensor& delta) {
  const Tensor each = sink_rows(call, lse, delta).neg_();
  return (call.packed() ? each.sum(-1) : each.sum(at::IntArrayRef{0, 2})).to(call.sinks->scalar_type());
}

// Returns the gradient of a bias that is equal for all keys of a query. Such a bias shifts the query's
// log-sum-exp and changes the probability of the sink. It does not change the probabilities of the keys
// relative to each other. The gradient is therefore computed from grad_lse and the sinks. A sum of the
// gradients of all scores would cancel except for rounding errors.
Tensor shared_bias_gradient(const Call& call, const Tensor& lse, const Tensor& delta,
                            const OptionalTensor& grad_lse) {
  // The bias's gradient starts at 0 for each query, or at NaN if the query's lse or delta is NaN or infinite.
  Tensor rows = lse.add(delta).mul_(0).to(at::kDouble);
  if (grad_lse) rows.add_(*grad_lse);
  if (call.sinks) rows.add_(sink_rows(call, lse, delta));
  // A query that sees no key contributes nothing to the gradient of its bias.
  rows.masked_fill_(lse.eq(-std::numeric_limits<double>::infinity()), 0);
  return rows.unsqueeze(-1).sum_to_size(call.bias->sizes()).to(call.bias->scalar_type());
}

namespace {

using Stack = torch::jit::Stack;

bool is_double(const Call& call) {
  if (call.q.scalar_type() != at::kDouble) return false;
  TORCH_CHECK(call.q.is_cpu(), kOp, ": q: expected fp32, bf16 or fp16 on ", call.q.device(),
              ", received fp64, which is for "
              "CPU tensors");
  return true;
}

template <Result (*run)(const Call&), bool kLse>
void forward(const c10::OperatorHandle& op, Stack* stack) {
  const Call call(BoxedArguments(op, *stack));
  const c10::OptionalDeviceGuard guard(call.q.device());
  Result result = is_double(call) ? forward_double(call) : run(call);
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, std::move(result.out));
  if (kLse) torch::jit::push(*stack, std::move(result.lse));
}

Upstream upstream_of(const BoxedArguments& arguments) {
  const auto list = arguments["output_mask"].toBoolList();
  Upstream u{arguments.tensor("grad_out"),
             arguments.optional("grad_lse"),
             arguments.tensor("out"),
             arguments.tensor("lse"),
             {}};
  std::copy(list.begin(), list.end(), u.mask.begin());
  return u;
}

void push(Stack* stack, const c10::OperatorHandle& op, const Gradients& gradients, const Tensor& q) {
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (const Tensor& t : gradients) torch::jit::push(*stack, t.defined() ? t : at::empty({0}, q.options()));
}

template <Gradients (*run)(const Call&, const Upstream&)>
void backward(const c10::OperatorHandle& op, Stack* stack) {
  const BoxedArguments arguments(op, *stack);
  const Call call(arguments);
  const Upstream upstream = upstream_of(arguments);
  const c10::OptionalDeviceGuard guard(call.q.device());
  push(stack, op, is_double(call) ? backward_double(call, upstream) : run(call, upstream), call.q);
}

Result forward_meta(const Call& call) {
  const auto type = compute_type(call.q);
  return {call.empty_out(), at::empty_symint(call.lse_sizes(), call.q.options().dtype(type))};
}

template <bool kLse>
void meta(const c10::OperatorHandle& op, Stack* stack) {
  const Call call(BoxedArguments(op, *stack));
  Result result = forward_meta(call);
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, std::move(result.out));
  if (kLse) torch::jit::push(*stack, std::move(result.lse));
}

void backward_meta(const c10::OperatorHandle& op, Stack* stack) {
  const BoxedArguments arguments(op, *stack);
  const Call call(arguments);
  const Upstream upstream = upstream_of(arguments);
  const Tensor none;
  const std::array<Tensor, kInputs> inputs{call.q, call.k, call.v, call.bias.value_or(none),
                                           call.sinks.value_or(none)};
  Gradients gradients;
  for (int i = 0; i < kInputs; ++i) {
    if (upstream.mask[i]) gradients[i] = at::empty_like(inputs[i]);
  }
  push(stack, op, gradients, call.q);
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("attention", boxed<&forward<forward_cpu, false>>());
  m.impl("attention_with_lse", boxed<&forward<forward_cpu, true>>());
  m.impl("_attention_backward", boxed<&backward<backward_cpu>>());
}
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("attention", boxed<&forward<forward_cuda, false>>());
  m.impl("attention_with_lse", boxed<&forward<forward_cuda, true>>());
  m.impl("_attention_backward", boxed<&backward<backward_cuda>>());
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("attention", boxed<&meta<false>>());
  m.impl("attention_with_lse", boxed<&meta<true>>());
  m.impl("_attention_backward", boxed<&backward_meta>());
}

}  // namespace
}  // namespace shoestring::attend

namespace shoestring {
namespace {

NamedArguments arguments_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const AttentionOptions& o) {
  return {{"q", q},
          {"k", k},
          {"v", v},
          {"bias", o.bias()},
          {"sinks", o.sinks()},
          {"causal", o.causal()},
          {"window_size", std::vector<int64_t>(o.window_size().begin(), o.window_size().end())},
          {"softcap", o.softcap()},
          {"scale", o.scale()},
          {"alibi_slopes", o.alibi_slopes()},
          {"cu_seqlens_q", o.cu_seqlens_q()},
          {"cu_seqlens_k", o.cu_seqlens_k()},
          {"dropout_p", o.dropout_p()},
          {"seed", o.seed()},
          {"deterministic", o.deterministic()}};
}

}  // namespace

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttentionOptions& options) {
  return call_by_name("shoestring::attention", arguments_of(q, k, v, options))[0].toTensor();
}

AttentionResult attention_with_lse(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const AttentionOptions& options) {
  const auto stack = call_by_name("shoestring::attention_with_lse", arguments_of(q, k, v, options));
  return {stack[0].toTensor(), stack[1].toTensor()};
}

}  // namespace shoestring
