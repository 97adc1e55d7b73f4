#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "core/tensors.h"
#include "layers/rope.h"
#include "layers/rope_table.h"

namespace shoestring::layers {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

namespace {

bool broadcasts(const c10::SymInt& size, const c10::SymInt& to) { return size == 1 || size == to; }

// Returns the batch size of q. It is 1 for a packed q, which has no batch dimension.
c10::SymInt batch_of(const Tensor& q) { return q.dim() == 4 ? q.sym_size(0) : c10::SymInt(1); }
c10::SymInt tokens_of(const Tensor& q) { return q.dim() == 4 ? q.sym_size(2) : q.sym_size(0); }

void check_tables(const RopeCall& c) {
  const c10::SymInt batch = batch_of(c.q), tokens = tokens_of(c.q);
  TORCH_CHECK(c.sin.sym_sizes() == c.cos.sym_sizes() && c.sin.scalar_type() == c.cos.scalar_type() &&
                  is_supported_float(c.cos.scalar_type()) && c.cos.device() == c.q.device() &&
                  c.sin.device() == c.q.device(),
              kRopeOp, ": cos, sin: expected one shape and floating-point dtype on ", c.q.device(),
              ", received ", c.cos.sym_sizes(), " of ", c.cos.scalar_type(), " on ", c.cos.device(), " and ",
              c.sin.sym_sizes(), " of ", c.sin.scalar_type(), " on ", c.sin.device());
  const int64_t turned = rotary_dim_of(c);
  const bool dims = c.cos.dim() == 2 || (c.cos.dim() == 3 && c.q.dim() == 4 && !c.position_ids.has_value());
  const bool rows =
      dims && (c.position_ids.has_value() ||
               (c.cos.sym_size(-2) == tokens && (c.cos.dim() == 2 || broadcasts(c.cos.sym_size(0), batch))));
  TORCH_CHECK(rows && (c.cos.sym_size(-1) == turned || c.cos.sym_size(-1) * 2 == turned), kRopeOp,
              ": cos: expected (", c.position_ids.has_value() ? "positions" : "tokens",
              ", width) with width ", turned, " or ", turned / 2, " for rotary_dim ", turned, " and ", tokens,
              " tokens, received ", c.cos.sym_sizes());
  if (!c.position_ids.has_value()) return;
  const Tensor& p = *c.position_ids;
  const bool fits = (p.dim() == 1 || (p.dim() == 2 && c.q.dim() == 4 && broadcasts(p.sym_size(0), batch))) &&
                    p.sym_size(-1) == tokens;
  TORCH_CHECK(fits && p.scalar_type() == at::kLong && p.device() == c.q.device(), kRopeOp,
              ": position_ids: expected (", tokens, ") or (1 or batch, ", tokens, ") int64 on ", c.q.device(),
              ", received ", p.sym_sizes(), " of ", p.scalar_type(), " on ", p.device());
}

}  // namespace

void check_rope(const RopeCall& c) {
  const int64_t dim = c.q.dim();
  TORCH_CHECK((dim == 3 || dim == 4) && is_supported_float(c.q.scalar_type()), kRopeOp,
              ": q: expected (batch, heads, tokens, head_dim) or (tokens, heads, head_dim) of fp32, fp64, "
              "bf16 or fp16, received ",
              c.q.sym_sizes(), " of ", c.q.scalar_type());
  const bool fits = c.k.dim() == dim && c.k.scalar_type() == c.q.scalar_type() &&
                    c.k.device() == c.q.device() && batch_of(c.k) == batch_of(c.q) &&
                    tokens_of(c.k) == tokens_of(c.q) && c.k.sym_size(-1) == c.q.sym_size(-1);
  TORCH_CHECK(fits, kRopeOp, ": k: expected q's shape (except the number of heads), dtype and device, ",
              c.q.sym_sizes(), " of ", c.q.scalar_type(), " on ", c.q.device(), ", received ",
              c.k.sym_sizes(), " of ", c.k.scalar_type(), " on ", c.k.device());
  const int64_t head_dim = c.q.size(-1), turned = rotary_dim_of(c);
  TORCH_CHECK(turned >= 0 && turned % 2 == 0 && turned <= head_dim, kRopeOp,
              ": rotary_dim: expected an even number of at most ", head_dim, ", head_dim, received ", turned);
  check_tables(c);
  TORCH_CHECK(c.q_weight.has_value() == c.k_weight.has_value(), kRopeOp,
              ": q_weight, k_weight: expected both or neither, received ",
              c.q_weight.has_value() ? "q_weight" : "k_weight", " alone");
  if (!c.q_weight.has_value()) return;
  TORCH_CHECK(head_dim <= kernels::kMostNormedHeadDim, kRopeOp, ": q_weight: expected a head_dim of at most ",
              kernels::kMostNormedHeadDim, " with a norm, received ", head_dim);
  for (const auto& [name, weight] : {std::pair{"q_weight", c.q_weight}, {"k_weight", c.k_weight}}) {
    TORCH_CHECK(weight->dim() == 1 && weight->sym_size(0) == head_dim &&
                    is_supported_float(weight->scalar_type()) && weight->device() == c.q.device(),
                kRopeOp, ": ", name, ": expected (", head_dim, ") of a floating-point type on ", c.q.device(),
                ", received ", weight->sym_sizes(), " of ", weight->scalar_type(), " on ", weight->device());
  }
}

Tensor empty_rotated(const Tensor& x) {
  return x.sym_strides().back() == 1 ? at::empty_like(x) : at::empty_symint(x.sym_sizes(), x.options());
}

Tensor empty_rotary_heads(const Tensor& x) {
  if (x.dim() == 3) return at::empty_symint(x.sym_sizes(), x.options());
  return at::empty_symint({x.sym_size(0), x.sym_size(2), x.sym_size(1), x.sym_size(3)}, x.options())
      .transpose(1, 2);
}

namespace {

// Returns the cosine or sine of each token and pair, from the table `table`: (tokens, 1, rotary_dim / 2) if q
// is packed, else (1 or batch, 1, tokens, rotary_dim / 2).
Tensor angles(const RopeCall& c, const Tensor& table) {
  const int64_t half = rotary_dim_of(c) / 2;
  Tensor t = table.to(at::kDouble);
  if (t.size(-1) != half) t = c.interleaved ? t.slice(-1, 0, 2 * half, 2) : t.narrow(-1, 0, half);
  if (c.position_ids.has_value()) t = at::embedding(t.contiguous(), *c.position_ids);
  return c.q.dim() == 3 ? t.unsqueeze(-2) : (t.dim() == 2 ? t.unsqueeze(0) : t).unsqueeze(1);
}

Tensor turned(const RopeCall& c, const Tensor& x, double sign) {
  const int64_t n = rotary_dim_of(c), half = n / 2;
  const Tensor part = x.narrow(-1, 0, n), cos = angles(c, c.cos), sin = angles(c, c.sin) * sign;
  const auto pick = [&](int64_t i) {
    return c.interleaved ? part.slice(-1, i, n, 2) : part.narrow(-1, i * half, half);
  };
  const Tensor a = pick(0), b = pick(1), first = a * cos - b * sin, second = b * cos + a * sin;
  const Tensor both =
      c.interleaved ? at::stack({first, second}, -1).flatten(-2) : at::cat({first, second}, -1);
  return at::cat({both, x.narrow(-1, n, x.size(-1) - n)}, -1);
}

Tensor reciprocal_root(const RopeCall& c, const Tensor& x) {
  return (x.square().mean(-1, true) + c.eps).rsqrt();
}

}  // namespace

std::tuple<Tensor, Tensor> rope_forward_double(const RopeCall& c) {
  const auto one = [&](const Tensor& x, const OptionalTensor& weight) {
    return turned(
        c, weight.has_value() ? x * reciprocal_root(c, x) * (weight->to(at::kDouble) + c.offset) : x, 1);
  };
  return {one(c.q, c.q_weight), one(c.k, c.k_weight)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> rope_backward_double(const RopeCall& c, const OptionalTensor& q,
                                                                const OptionalTensor& k) {
  const auto one = [&](const Tensor& grad, const OptionalTensor& x, const OptionalTensor& weight) {
    const Tensor back = turned(c, grad, -1);
    if (!weight.has_value()) return std::pair(back, Tensor());
    const Tensor rstd = reciprocal_root(c, *x), h = *x * rstd,
                 g = back * (weight->to(at::kDouble) + c.offset);
    const int64_t dim = grad.size(-1);
    return std::pair(
        (g - h * (g * h).mean(-1, true)) * rstd,
        (back * h).reshape({grad.numel() / std::max<int64_t>(1, dim), dim}).sum(0).to(weight->scalar_type()));
  };
  const auto [grad_q, q_weight] = one(c.q, q, c.q_weight);
  const auto [grad_k, k_weight] = one(c.k, k, c.k_weight);
  return {grad_q, grad_k, q_weight, k_weight};
}

}  // namespace shoestring::layers
