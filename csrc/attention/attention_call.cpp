// Checks the arguments of an attention operator and converts them to the struct that kernels take.
#include "attention/attention.h"

#include <algorithm>
#include <cmath>

#include <ATen/Context.h>
#include <ATen/Functions.h>

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

Call::Call(const BoxedArguments& arguments)
    : q(arguments.tensor("q")), k(arguments.tensor("k")), v(arguments.tensor("v")),
      bias(arguments.optional("bias")), sinks(arguments.optional("sinks")),
      alibi_slopes(arguments.optional("alibi_slopes")), cu_seqlens_q(arguments.optional("cu_seqlens_q")),
      cu_seqlens_k(arguments.optional("cu_seqlens_k")), seed(arguments.optional("seed")),
      causal(arguments["causal"].toBool()), softcap(arguments.number("softcap")), scale(0),
      dropout_p(arguments.number("dropout_p")) {
  const auto window = arguments["window_size"].toIntVector();
  TORCH_CHECK(window.size() == 2, kOp,
              ": window_size: expected two numbers, of tokens to the left and to the right, received ",
              window.size());
  left = window[0], right = window[1];
  deterministic =
      arguments["deterministic"].toOptional<bool>().value_or(at::globalContext().deterministicAlgorithms());
  check();
  const auto given = arguments["scale"].toOptional<double>();
  scale = given ? *given : 1 / std::sqrt(static_cast<double>(q.sym_size(-1).guard_int(__FILE__, __LINE__)));
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
    const bool fits = t.dim() >= 1 && t.dim() <= 2 && t.sym_size(-1) == heads &&
                      (t.dim() == 1 || (!packed() && t.sym_size(0) == q.sym_size(0)));
    check_vector("alibi_slopes", t, q, packed() ? "(heads)" : "(heads) or (batch, heads)", fits);
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
  // Sorts the dimensions of q, except for the features, by stride in descending order.
  std::array<int64_t, kMostSizes> order{0, 1, 2}, places{};
  const int64_t outer = q.dim() - 1;
  std::stable_sort(order.begin(), order.begin() + outer,
                   [&](int64_t a, int64_t b) { return q.sym_stride(a) > q.sym_stride(b); });
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

}  // namespace shoestring::attend
