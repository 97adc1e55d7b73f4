#include "attention/attention_shapes.h"

#include <algorithm>

#include <ATen/Functions.h>

namespace shoestring::attend {
namespace {

constexpr int64_t kInner = 3;  // the dimensions of heads, tokens and features
constexpr int64_t kDims = 4;   // dimensions of the kernels' inputs

bool has_kernel_shapes(const Arguments& a) {
  const auto &bias = a.options.bias(), &slopes = a.options.alibi_slopes();
  if (a.options.cu_seqlens_q()) return !bias || bias->dim() >= kInner;
  if (a.q.dim() != kDims || a.k.dim() != kDims || a.v.dim() != kDims) return false;
  if (bias && bias->dim() != kDims) return false;
  if (slopes && slopes->dim() > 1 && slopes->sym_size(0) != a.q.sym_size(0)) return false;
  return a.k.sym_size(0) == a.q.sym_size(0) && a.v.sym_size(0) == a.q.sym_size(0) &&
         a.k.sym_size(1) == a.v.sym_size(1) && (a.q.sym_size(1) != 1 || a.k.sym_size(1) == 1);
}

// Returns the size of dimension `dim` of a tensor that is given leading dimensions of size 1 until it has
// `dims` dimensions.
c10::SymInt size_of(const Tensor& t, int64_t dim, int64_t dims) {
  const int64_t tensor_dim = dim - (dims - t.dim());
  return tensor_dim < 0 ? c10::SymInt(1) : t.sym_size(tensor_dim);
}

// Returns the size that `a` and `b` broadcast to, or none.
std::optional<c10::SymInt> broadcast(const c10::SymInt& a, const c10::SymInt& b) {
  if (a == b || b == 1) return a;
  if (a == 1) return b;
  return std::nullopt;
}

// Returns t with leading dimensions of size 1, so that it has at least `dims` dimensions.
Tensor with_dims(Tensor t, int64_t dims) {
  while (t.dim() < dims) t = t.unsqueeze(0);
  return t;
}

// Expands the leading dimensions of t to `leading` and views them as one. The others stay, except that the
// first of them becomes `first`.
Tensor as_batch(Tensor t, const at::SymDimVector& leading, const c10::SymInt& first) {
  const auto places = static_cast<int64_t>(leading.size());
  t = with_dims(std::move(t), places);
  at::SymDimVector sizes(leading), merged{1};
  for (const auto& size : leading) merged[0] = merged[0] * size;
  for (int64_t i = places; i < t.dim(); ++i) {
    sizes.push_back(i == places ? first : t.sym_size(i));
    merged.push_back(sizes.back());
  }
  if (t.sym_sizes() != at::SymIntArrayRef(sizes)) t = t.expand_symint(sizes);
  return places == 1 ? t : t.reshape_symint(merged);
}

}  // namespace

Shapes::Shapes(Arguments& a) {
  if (has_kernel_shapes(a)) return;
  auto bias = a.options.bias(), slopes = a.options.alibi_slopes();
  if (a.options.cu_seqlens_q()) {
    a.options.bias(with_dims(*bias, kInner));
    return;
  }
  int64_t dims = 0;
  for (const auto& [name, t] : {std::pair("q", a.q), std::pair("k", a.k), std::pair("v", a.v)}) {
    TORCH_CHECK(t.dim() >= 2, kOp, ": ", name, ": expected (..., heads, tokens, features), received ",
                t.sym_sizes());
    dims = std::max(dims, t.dim());
  }
  const auto together = [&](int64_t dim, const Tensor& x, const Tensor& y, const char* name) {
    const auto size = broadcast(size_of(x, dim, dims), size_of(y, dim, dims));
    TORCH_CHECK(size, kOp, ": ", name,
                ": expected sizes in front of the tokens that broadcast, received q of ", a.q.sym_sizes(),
                ", k of ", a.k.sym_sizes(), " and v of ", a.v.sym_sizes());
    return *size;
  };
  at::SymDimVector leading;
  for (int64_t i = 0; i < dims - kInner; ++i) {
    const auto size = broadcast(together(i, a.q, a.k, "k"), size_of(a.v, i, dims));
    TORCH_CHECK(size, kOp, ": v: expected sizes in front of the tokens that broadcast, received v of ",
                a.v.sym_sizes(), " for q of ", a.q.sym_sizes(), " and k of ", a.k.sym_sizes());
    leading.push_back(*size);
  }
  const int64_t head = dims - kInner;  // -1 if there are no heads
  const c10::SymInt kv_heads = head < 0 ? 1 : together(head, a.k, a.v, "v");
  const c10::SymInt own_heads = head < 0 ? c10::SymInt(1) : size_of(a.q, head, dims);
  const c10::SymInt heads = own_heads == 1 ? kv_heads : own_heads;

  at::SymDimVector rows(leading);
  if (head >= 0) rows.push_back(heads);
  rows.push_back(a.q.sym_size(-2));
  if (dims != kDims) rows_ = rows;
  if (leading.empty()) leading.push_back(1);  // the kernels' batch
  const auto places = static_cast<int64_t>(leading.size());

  if (bias) {
    TORCH_CHECK(bias->dim() <= dims, kOp, ": bias: expected at most ", dims,
                " dimensions, as q, k and v have, "
                "received ",
                bias->sym_sizes());
    Tensor t = with_dims(*bias, std::max(dims, kDims));
    bool one = true;
    for (int64_t i = 0; i < places; ++i) {
      const bool is_one = t.sym_size(i) == 1;
      TORCH_CHECK(is_one || t.sym_size(i) == leading[i], kOp,
                  ": bias: expected sizes that broadcast to the scores of q and k, received ",
                  bias->sym_sizes(), " for q of ", a.q.sym_sizes(), " and k of ", a.k.sym_sizes());
      one &= is_one;
    }
    const at::SymDimVector ones(leading.size(), c10::SymInt(1));
    if (places > 1) t = as_batch(t, one ? ones : leading, t.sym_size(places));
    a.options.bias(t);
  }
  if (slopes && slopes->dim() > 1) {
    const int64_t most = std::max<int64_t>(1, dims - 2);
    bool fits = slopes->dim() <= most && slopes->sym_size(-1) == heads;
    for (int64_t i = 0; fits && i < most - 1; ++i) {
      const c10::SymInt size = size_of(*slopes, i, most);
      fits = size == 1 || size == leading[i];
    }
    TORCH_CHECK(fits, kOp,
                ": alibi_slopes: expected (heads), or (batch, heads) as in front of the tokens of q, "
                "received ",
                slopes->sym_sizes(), " for q of ", a.q.sym_sizes());
    a.options.alibi_slopes(as_batch(with_dims(*slopes, most), leading, heads));
  }
  a.q = as_batch(with_dims(a.q, std::max(dims, kDims)), leading, heads);
  a.k = as_batch(with_dims(a.k, std::max(dims, kDims)), leading, kv_heads);
  a.v = as_batch(with_dims(a.v, std::max(dims, kDims)), leading, kv_heads);
}

Result Shapes::restore(Result result) const {
  if (!rows_) return result;
  at::SymDimVector sizes(*rows_);
  sizes.push_back(result.out.sym_size(-1));
  Tensor rest = result.lse_rest.defined() ? result.lse_rest.view_symint(*rows_) : Tensor();
  return {result.out.view_symint(sizes), result.lse.view_symint(*rows_), std::move(rest)};
}

}  // namespace shoestring::attend
