// Checks the arguments of the attention operators, converts them to the struct that kernels take, and
// implements the operators for every device.
#include "attention/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "attention/attention_shapes.h"
#include "core/tensors.h"
#include "layers/seeded_dropout.h"

namespace shoestring::attend {
namespace {

constexpr int64_t kMostSizes = 3;  // maximum number of dimensions of q, k or v, not counting the features

bool is_given(int64_t window) { return window >= 0; }

void check_seqlens(const char* name, const Tensor& t, const Tensor& q) {
  TORCH_CHECK(t.dim() == 1 && t.scalar_type() == at::kInt && t.device() == q.device(), kOp, ": ", name,
              ": expected the (sequences + 1) offsets of packed tokens as int32 on ", q.device(),
              ", received ", t.sym_sizes(), " of ", t.scalar_type(), " on ", t.device());
}

void check_vector(const char* name, const Tensor& t, const Tensor& q, const char* expected, bool fits) {
  TORCH_CHECK(fits && is_supported_float(t.scalar_type()) && t.device() == q.device(), kOp, ": ", name,
              ": expected ", expected, " of floating-point type on ", q.device(), ", received ",
              t.sym_sizes(), " of ", t.scalar_type(), " on ", t.device());
}

}  // namespace

Call::Call(const Arguments& arguments)
    : q(arguments.q), k(arguments.k), v(arguments.v), bias(arguments.options.bias()),
      sinks(arguments.options.sinks()), alibi_slopes(arguments.options.alibi_slopes()),
      cu_seqlens_q(arguments.options.cu_seqlens_q()), cu_seqlens_k(arguments.options.cu_seqlens_k()),
      seed(arguments.options.seed()), causal(arguments.options.causal()),
      left(arguments.options.window_size()[0]), right(arguments.options.window_size()[1]),
      softcap(arguments.options.softcap()), scale(0), dropout_p(arguments.options.dropout_p()),
      deterministic(
          arguments.options.deterministic().value_or(at::globalContext().deterministicAlgorithms())) {
  check();
  const auto option = arguments.options.scale();
  scale = option ? *option : 1 / std::sqrt(static_cast<double>(q.sym_size(-1).guard_int(__FILE__, __LINE__)));
  if (cu_seqlens_q && !cu_seqlens_k) cu_seqlens_k = cu_seqlens_q;
}

void Call::check() const {
  const int64_t dims = packed() ? 3 : 4;
  const char* shape =
      packed() ? "(tokens, heads, features) with cu_seqlens_q" : "(batch, heads, tokens, features)";
  for (const auto& [name, t] : {std::pair("q", q), std::pair("k", k), std::pair("v", v)}) {
    TORCH_CHECK(t.dim() == dims, kOp, ": ", name, ": expected ", shape, ", received ", t.sym_sizes());
    TORCH_CHECK(
        is_supported_float(t.scalar_type()) && t.scalar_type() == q.scalar_type() && t.device() == q.device(),
        kOp, ": ", name, ": expected fp32, fp64, bf16 or fp16, and q's dtype and device, ", q.scalar_type(),
        " on ", q.device(), ", received ", t.scalar_type(), " on ", t.device());
  }
  const int token = packed() ? 0 : 2;
  TORCH_CHECK(k.sym_size(-1) == q.sym_size(-1) && k.sym_size(-1) > 0, kOp, ": k: expected q's ",
              q.sym_size(-1), " features, at least one, received ", k.sym_sizes());
  TORCH_CHECK(v.sym_size(token) == k.sym_size(token) && v.sym_size(1) == k.sym_size(1), kOp,
              ": v: expected k's tokens and heads, received ", v.sym_sizes(), " for k of ", k.sym_sizes());
  TORCH_CHECK(packed() || (k.sym_size(0) == q.sym_size(0) && v.sym_size(0) == q.sym_size(0)), kOp,
              ": k and v: expected q's batch, ", q.sym_size(0), ", received ", k.sym_sizes(), " and ",
              v.sym_sizes());
  TORCH_CHECK(k.sym_size(1) > 0 && q.sym_size(1) % k.sym_size(1) == 0, kOp,
              ": k: expected a number of heads that divides q's, ", q.sym_size(1), ", received ",
              k.sym_size(1));
  TORCH_CHECK(left >= -1 && right >= -1, kOp,
              ": window_size: expected tokens to the left and to the right, -1 for all, received (", left,
              ", ", right, ")");
  TORCH_CHECK(softcap >= 0 && std::isfinite(softcap), kOp,
              ": softcap: expected a number above 0, or 0 for none, received ", softcap);
  if (packed()) check_seqlens("cu_seqlens_q", *cu_seqlens_q, q);
  TORCH_CHECK(packed() || !cu_seqlens_k, kOp, ": cu_seqlens_k: expected cu_seqlens_q as well, received none");
  if (cu_seqlens_k) {
    check_seqlens("cu_seqlens_k", *cu_seqlens_k, q);
    TORCH_CHECK(cu_seqlens_k->sym_size(0) == cu_seqlens_q->sym_size(0), kOp,
                ": cu_seqlens_k: expected as many sequences as "
                "in cu_seqlens_q, received ",
                cu_seqlens_k->sym_size(0), " offsets for ", cu_seqlens_q->sym_size(0));
  }
  const auto heads = q.sym_size(1);
  if (sinks) check_vector("sinks", *sinks, q, "(heads)", sinks->dim() == 1 && sinks->sym_size(0) == heads);
  if (alibi_slopes) {
    const auto& t = *alibi_slopes;
    const bool fits =
        t.dim() >= 1 && t.dim() <= 2 && t.sym_size(-1) == heads &&
        (t.dim() == 1 || t.sym_size(0) == (packed() ? cu_seqlens_q->sym_size(0) - 1 : q.sym_size(0)));
    check_vector("alibi_slopes", t, q,
                 packed() ? "(heads) or (sequences, heads)" : "(heads) or (batch, heads)", fits);
    TORCH_CHECK(!t.requires_grad(), kOp,
                ": alibi_slopes: expected a tensor without requires_grad, since slopes get no gradient; "
                "detach them, or pass a bias");
  }
  if (bias) {
    const auto& t = *bias;
    const auto one_of = [&](int64_t dim, const c10::SymInt& size) {
      return t.sym_size(dim) == 1 || t.sym_size(dim) == size;
    };
    const bool fits = packed() ? t.dim() == 3 && one_of(0, heads) && one_of(1, q.sym_size(0))
                               : t.dim() == 4 && one_of(0, q.sym_size(0)) && one_of(1, heads) &&
                                     one_of(2, q.sym_size(2)) && one_of(3, k.sym_size(2));
    TORCH_CHECK(fits, kOp, ": bias: expected ",
                packed() ? "(heads, tokens, keys of the longest sequence)" : "(batch, heads, queries, keys)",
                ", any of them 1, received ", t.sym_sizes(), " for q of ", q.sym_sizes(), " and k of ",
                k.sym_sizes());
    TORCH_CHECK(
        (is_supported_float(t.scalar_type()) || t.scalar_type() == at::kBool) && t.device() == q.device(),
        kOp, ": bias: expected a floating-point tensor, or bool with true for visible keys, on ", q.device(),
        ", received ", t.scalar_type(), " on ", t.device());
    TORCH_CHECK(t.scalar_type() != at::kDouble || q.scalar_type() == at::kDouble, kOp,
                ": bias: expected fp32, bf16, fp16 or bool, received fp64 for q of ", q.scalar_type());
  }
  layers::check_dropout(kOp, dropout_p, seed, q.device());
}

at::SymDimVector Call::out_sizes() const {
  at::SymDimVector sizes(q.sym_sizes());
  sizes.back() = v.sym_size(-1);
  return sizes;
}

at::SymDimVector Call::lse_sizes() const {
  if (packed()) return {q.sym_size(1), q.sym_size(0)};
  return {q.sym_size(0), q.sym_size(1), q.sym_size(2)};
}

Tensor Call::empty_out() const {
  const auto sizes = out_sizes();
  // Sorts the dimensions of q, except for the features, by stride in descending order. Dimensions along which
  // q is expanded come first, so that the output of an expanded q is contiguous.
  std::array<int64_t, kMostSizes> order{0, 1, 2}, places{};
  const int64_t outer = q.dim() - 1;
  std::stable_sort(order.begin(), order.begin() + outer, [&](int64_t a, int64_t b) {
    const auto x = q.sym_stride(a), y = q.sym_stride(b);
    return y != 0 && (x == 0 || x > y);
  });
  at::SymDimVector lying;
  for (int64_t i = 0; i < outer; ++i) lying.push_back(sizes[order[i]]), places[order[i]] = i;
  lying.push_back(sizes.back());
  at::DimVector back(places.begin(), places.begin() + outer);
  back.push_back(outer);
  return at::empty_symint(lying, q.options()).permute(back);
}

kernels::HeadStrides strides_of(const Tensor& t) {
  return t.dim() == 3 ? kernels::HeadStrides{0, t.stride(1), t.stride(0)}
                      : kernels::HeadStrides{t.stride(0), t.stride(1), t.stride(2)};
}

Tensor with_features_together(const Tensor& t) {
  return t.stride(-1) == 1 || t.size(-1) == 1 ? t : t.contiguous();
}

kernels::AttentionProblem Call::problem() const {
  const bool flat = packed();
  kernels::AttentionProblem p{};
  p.batch = flat ? cu_seqlens_q->numel() - 1 : q.size(0);
  p.heads = q.size(1), p.kv_heads = k.size(1);
  p.queries = q.size(flat ? 0 : 2), p.keys = k.size(flat ? 0 : 2);
  p.head_dim = q.size(-1), p.value_dim = v.size(-1);
  kept_.clear();
  const auto keep = [&](const Tensor& t) { return kept_.emplace_back(t.contiguous()).const_data_ptr(); };
  if (flat) {
    p.cu_seqlens_q = static_cast<const int32_t*>(keep(*cu_seqlens_q));
    p.cu_seqlens_k = static_cast<const int32_t*>(keep(*cu_seqlens_k));
  }
  p.left = is_given(left) ? std::min(left, kernels::kUnlimited) : kernels::kUnlimited;
  p.right = causal ? 0 : is_given(right) ? std::min(right, kernels::kUnlimited) : kernels::kUnlimited;
  p.scale = static_cast<float>(scale), p.softcap = static_cast<float>(softcap);
  if (bias) {
    const Tensor t = bias->stride(-1) == 1 || bias->size(-1) == 1 ? *bias : bias->contiguous();
    kept_.push_back(t);
    p.bias = t.const_data_ptr();
    p.bias_type = t.scalar_type() == at::kBool       ? kernels::BiasType::kBool
                  : t.scalar_type() == at::kBFloat16 ? kernels::BiasType::kBFloat16
                  : t.scalar_type() == at::kHalf     ? kernels::BiasType::kHalf
                                                     : kernels::BiasType::kFloat;
    const auto stride = [&](int64_t dim) { return t.size(dim) == 1 ? 0 : t.stride(dim); };
    p.bias_batch = flat ? 0 : stride(0);
    p.bias_head = stride(-3), p.bias_query = stride(-2), p.bias_key = stride(-1);
    p.bias_columns = t.size(-1);
  }
  const auto floats = [&](const OptionalTensor& t) {
    return t ? static_cast<const float*>(keep(t->to(at::kFloat))) : nullptr;
  };
  p.slopes = floats(alibi_slopes);
  p.slopes_batch = alibi_slopes && alibi_slopes->dim() == 2 ? p.heads : 0;
  p.sinks = floats(sinks);
  if (seed && dropout_p > 0) {
    const auto rule = layers::dropout_rule(dropout_p);
    p.seed = seed->const_data_ptr<int64_t>();
    p.threshold = rule.threshold, p.kept = rule.scale;
  }
  return p;
}

namespace {

// Returns exp(sink - lse) * delta for each query, where exp(sink - lse) is the attention probability of the
// sink. Uses fp64, because the caller's sum of these products may cancel.
Tensor sink_rows(const Call& call, const Upstream& upstream, const Tensor& delta) {
  Tensor x = call.sinks->to(at::kDouble).unsqueeze(-1).sub(upstream.lse);
  if (upstream.lse_rest) x.sub_(*upstream.lse_rest);
  return x.exp_().mul_(delta);
}

}  // namespace

// The gradient of a sink is the sum over queries of -probability of the sink * delta, because a sink has no
// value vector.
Tensor sinks_gradient(const Call& call, const Upstream& upstream, const Tensor& delta) {
  const Tensor each = sink_rows(call, upstream, delta).neg_();
  return (call.packed() ? each.sum(-1) : each.sum(at::IntArrayRef{0, 2})).to(call.sinks->scalar_type());
}

// Returns the gradient of a bias that is equal for all keys of a query. Such a bias shifts the query's
// log-sum-exp and changes the probability of the sink. It does not change the probabilities of the keys
// relative to each other. The gradient is therefore computed from grad_lse and the sinks. A sum of the
// gradients of all scores would cancel except for rounding errors.
Tensor shared_bias_gradient(const Call& call, const Upstream& upstream, const Tensor& delta) {
  // The bias's gradient starts at 0 for each query, or at NaN if the query's lse or delta is NaN or infinite.
  Tensor rows = upstream.lse.add(delta).mul_(0).to(at::kDouble);
  if (upstream.grad_lse) rows.add_(*upstream.grad_lse);
  if (call.sinks) rows.add_(sink_rows(call, upstream, delta));
  // A query that sees no key contributes nothing to the gradient of its bias.
  rows.masked_fill_(upstream.lse.eq(-std::numeric_limits<double>::infinity()), 0);
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

// The number of results of the operators attention, attention_with_lse and _attention_forward.
constexpr int kOut = 1, kOutAndLse = 2, kOutLseAndRest = 3;

// Replaces the arguments of attention on the stack by its results.
template <int kResults>
void finish(Stack* stack, Result&& result) {
  torch::jit::drop(*stack, count_of<Arguments>());
  torch::jit::push(*stack, std::move(result.out));
  if (kResults >= kOutAndLse) torch::jit::push(*stack, std::move(result.lse));
  if (kResults >= kOutLseAndRest) torch::jit::push(*stack, std::move(result.lse_rest));
}

template <Result (*run)(const Call&, bool), int kResults>
void forward(const c10::OperatorHandle&, Stack* stack) {
  auto arguments = read_arguments<Arguments>(*stack);
  const Shapes shapes(arguments);
  const Call call(arguments);
  const c10::OptionalDeviceGuard guard(call.q.device());
  constexpr bool with_rest = kResults >= kOutLseAndRest;
  finish<kResults>(stack,
                   shapes.restore(is_double(call) ? forward_double(call, with_rest) : run(call, with_rest)));
}

void finish_backward(Stack* stack, Gradients&& gradients, const Tensor& q) {
  BackwardResults results{std::move(gradients)};
  fill_gradients(results.gradients, q);
  torch::jit::drop(*stack, count_of<BackwardArguments>());
  push_fields(*stack, results);
}

template <Gradients (*run)(const Call&, const Upstream&)>
void backward(const c10::OperatorHandle&, Stack* stack) {
  const auto arguments = read_arguments<BackwardArguments>(*stack);
  const Call call(arguments.forward);
  const c10::OptionalDeviceGuard guard(call.q.device());
  finish_backward(stack, is_double(call) ? backward_double(call, arguments) : run(call, arguments), call.q);
}

template <int kResults>
void meta(const c10::OperatorHandle&, Stack* stack) {
  auto arguments = read_arguments<Arguments>(*stack);
  const Shapes shapes(arguments);
  const Call call(arguments);
  const Tensor lse = at::empty_symint(call.lse_sizes(), call.q.options().dtype(compute_type(call.q)));
  finish<kResults>(stack, shapes.restore({call.empty_out(), lse, at::empty_like(lse)}));
}

void backward_meta(const c10::OperatorHandle&, Stack* stack) {
  const auto arguments = read_arguments<BackwardArguments>(*stack);
  const Call call(arguments.forward);
  const auto inputs = arguments.forward.inputs();
  Gradients gradients;
  for (int i = 0; i < kInputs; ++i) {
    if (arguments.mask[i]) gradients[i] = at::empty_like(*inputs[i]);
  }
  finish_backward(stack, std::move(gradients), call.q);
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("attention", boxed<&forward<forward_cpu, kOut>>());
  m.impl("attention_with_lse", boxed<&forward<forward_cpu, kOutAndLse>>());
  m.impl("_attention_forward", boxed<&forward<forward_cpu, kOutLseAndRest>>());
  m.impl("_attention_backward", boxed<&backward<backward_cpu>>());
}
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("attention", boxed<&forward<forward_cuda, kOut>>());
  m.impl("attention_with_lse", boxed<&forward<forward_cuda, kOutAndLse>>());
  m.impl("_attention_forward", boxed<&forward<forward_cuda, kOutLseAndRest>>());
  m.impl("_attention_backward", boxed<&backward<backward_cuda>>());
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("attention", boxed<&meta<kOut>>());
  m.impl("attention_with_lse", boxed<&meta<kOutAndLse>>());
  m.impl("_attention_forward", boxed<&meta<kOutLseAndRest>>());
  m.impl("_attention_backward", boxed<&backward_meta>());
}

}  // namespace
}  // namespace shoestring::attend

namespace shoestring {

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttentionOptions& options) {
  static const Operator<attend::Arguments, TensorResult> op("shoestring::attention");
  return op({q, k, v, options}).tensor;
}

AttentionResult attention_with_lse(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const AttentionOptions& options) {
  static const Operator<attend::Arguments, attend::Result> op("shoestring::attention_with_lse");
  attend::Result result = op({q, k, v, options});
  return {std::move(result.out), std::move(result.lse)};
}

}  // namespace shoestring
