// Attention in fp64 on the CPU, for gradient checks. Runs PyTorch's operators on one block of queries at a
// time, for all heads together.

#include <algorithm>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "attention/attention.h"
#include "core/philox.h"
#include "layers/seeded_dropout.h"

namespace shoestring::attend {
namespace {

constexpr int64_t kBlock = 64;  // number of queries in a block

// Sequences of equal length that are computed together, either the whole batch or one packed sequence, and
// their position in the tensors of the call.
struct Part {
  Tensor q, k, v;  // shape (batch, heads, tokens, features); k and v are repeated to have as many heads as q
  Tensor bias;     // attention bias that broadcasts to (batch, heads, queries, keys), or undefined
  Tensor slopes;   // ALiBi's slopes, which broadcast to (batch, heads), or undefined
  int64_t first_row;  // index in the flattened lse of the first query of the first head
  int64_t head_rows;  // distance in the flattened lse from one head to the next
  int64_t begin_q, begin_k;
};

// Returns the tokens [begin, end) of a packed tensor as (1, heads, tokens, features). Returns an unpacked
// tensor unchanged.
Tensor tokens_of(const Tensor& t, bool packed, int64_t begin, int64_t end) {
  return packed ? t.slice(0, begin, end).transpose(0, 1).unsqueeze(0) : t;
}

Tensor for_each_head(const Tensor& t, int64_t heads) { return t.repeat_interleave(heads / t.size(1), 1); }

template <class Body>
void for_each_part(const Call& call, Body body) {
  const int64_t heads = call.q.size(1);
  if (!call.packed()) {
    body(Part{call.q, for_each_head(call.k, heads), for_each_head(call.v, heads),
              call.bias.value_or(Tensor()), call.alibi_slopes.value_or(Tensor()), 0, call.q.size(2), 0, 0});
    return;
  }
  const Tensor offsets_q = call.cu_seqlens_q->contiguous(), offsets_k = call.cu_seqlens_k->contiguous();
  const int32_t *q = offsets_q.const_data_ptr<int32_t>(), *k = offsets_k.const_data_ptr<int32_t>();
  for (int64_t s = 0; s + 1 < offsets_q.numel(); ++s) {
    Tensor bias, slopes;
    if (call.alibi_slopes) {
      slopes = call.alibi_slopes->dim() == 2 ? call.alibi_slopes->select(0, s) : *call.alibi_slopes;
    }
    if (call.bias) {
      const Tensor& t = *call.bias;
      bias = (t.size(1) == 1 ? t : t.slice(1, q[s], q[s + 1])).unsqueeze(0);
      if (t.size(2) != 1) bias = bias.slice(-1, 0, k[s + 1] - k[s]);
    }
    body(Part{tokens_of(call.q, true, q[s], q[s + 1]),
              for_each_head(tokens_of(call.k, true, k[s], k[s + 1]), heads),
              for_each_head(tokens_of(call.v, true, k[s], k[s + 1]), heads), bias, slopes, q[s],
              call.q.size(0), q[s], k[s]});
  }
}

// Returns a mask (queries, keys) for the queries [begin, end): 0 for keys that the query sees and -inf for
// other keys.
Tensor hidden_keys(const Call& call, const Part& part, int64_t begin, int64_t end) {
  const int64_t keys = part.k.size(2), shift = keys - part.q.size(2);
  const auto integers = part.q.options().dtype(at::kLong);
  const Tensor distance =
      at::arange(keys, integers).unsqueeze(0) - at::arange(begin + shift, end + shift, integers).unsqueeze(1);
  Tensor hidden = at::zeros(distance.sizes(), part.q.options());
  const double never = -std::numeric_limits<double>::infinity();
  if (call.left >= 0) hidden.masked_fill_(distance.lt(-call.left), never);
  if (call.right >= 0 || call.causal) hidden.masked_fill_(distance.gt(call.causal ? 0 : call.right), never);
  return hidden;
}

Tensor distances(const Part& part, int64_t begin, int64_t end) {
  const int64_t keys = part.k.size(2), shift = keys - part.q.size(2);
  return (at::arange(keys, part.q.options()).unsqueeze(0) -
          at::arange(begin + shift, end + shift, part.q.options()).unsqueeze(1))
      .abs_();
}

struct Scores {
  Tensor scores;  // (batch, heads, queries, keys)
  Tensor slope;   // derivative of the softcap with respect to each scaled score; undefined without softcap
};

Tensor bias_rows(const Tensor& bias, int64_t begin, int64_t end) {
  return bias.size(2) == 1 ? bias : bias.slice(2, begin, end);
}

Scores scores_of(const Call& call, const Part& part, int64_t begin, int64_t end) {
  Scores s{at::matmul(part.q.slice(2, begin, end), part.k.transpose(-1, -2)).mul_(call.scale), {}};
  if (call.softcap > 0) {
    const Tensor t = at::tanh(s.scores / call.softcap);
    s.scores = t * call.softcap;
    s.slope = 1 - t * t;
  }
  if (part.bias.defined()) {
    const Tensor rows = bias_rows(part.bias, begin, end);
    if (rows.scalar_type() == at::kBool) {
      s.scores.masked_fill_(rows.logical_not(), -std::numeric_limits<double>::infinity());
    } else {
      s.scores.add_(rows);
    }
  }
  if (part.slopes.defined()) {
    const Tensor slopes = part.slopes.to(at::kDouble).unsqueeze(-1).unsqueeze(-1);
    s.scores.sub_(slopes * distances(part, begin, end));
  }
  s.scores.add_(hidden_keys(call, part, begin, end));
  return s;
}

// Returns dropout's factor for each probability: 0 or 1 / (1 - p). Undefined without dropout.
Tensor dropout_factors(const Call& call, const Part& part, const Tensor& like, int64_t begin) {
  if (call.dropout_p == 0) return {};
  const auto rule = layers::dropout_rule(call.dropout_p);
  const double scale = 65536.0 / (65536.0 - rule.threshold);
  const auto seed = static_cast<uint64_t>(*call.seed->const_data_ptr<int64_t>());
  Tensor mask = at::empty(like.sizes(), like.options());
  double* to = mask.mutable_data_ptr<double>();
  const int64_t heads = like.size(1), queries = like.size(2), keys = like.size(3);
  for (int64_t h = 0; h < like.size(0) * heads; ++h) {
    for (int64_t i = 0; i < queries; ++i) {
      const auto row = static_cast<uint32_t>(part.first_row + h * part.head_rows + begin + i);
      for (int64_t j = 0; j < keys; ++j) {
        const auto random = kernels::philox_at(seed, uint64_t{kernels::kAttentionStream} << 32 | row, j / 8);
        *to++ = (random.value[j % 8 / 2] >> (j % 2 * 16) & 0xffffu) < rule.threshold ? 0 : scale;
      }
    }
  }
  return mask;
}

Tensor lse_of(const Tensor& lse, bool packed, const Part& part, int64_t begin, int64_t end) {
  return packed ? lse.slice(1, part.begin_q + begin, part.begin_q + end).unsqueeze(0)
                : lse.slice(2, begin, end);
}

struct Probabilities {
  Tensor p;     // attention probabilities, or 0 for queries that see no key
  Tensor rest;  // log of the sum of exp(score - lse), the part of the log-sum-exp that rounding has lost
};

// Returns exp(scores - lse), divided by their sum, in which the sink's takes part. The sum is 1 unless lse is
// large.
Probabilities probabilities(const Call& call, const Tensor& scores, const Tensor& lse) {
  const Tensor some = at::where(at::isinf(lse).logical_and(lse.lt(0)), at::zeros_like(lse), lse);
  Tensor p = at::exp(scores - some.unsqueeze(-1)), sum = p.sum(-1);
  if (call.sinks) sum.add_(at::exp(call.sinks->to(at::kDouble).unsqueeze(-1) - some));
  sum.masked_fill_(sum.eq(0), 1);
  return {p.div_(sum.unsqueeze(-1)), sum.log()};
}

template <class Body>
void for_each_block(const Part& part, Body body) {
  for (int64_t begin = 0; begin < part.q.size(2); begin += kBlock)
    body(begin, std::min(begin + kBlock, part.q.size(2)));
}

// Adds t (batch, heads, ...) to `sum`, after summing t over the dimensions in which `sum` has size 1.
void add_reduced(Tensor sum, const Tensor& t) { sum.add_(t.sum_to_size(sum.sizes())); }

}  // namespace

Result forward_double(const Call& call, bool with_rest) {
  Result r{call.empty_out(), at::empty_symint(call.lse_sizes(), call.q.options()), {}};
  if (with_rest) r.lse_rest = at::empty_like(r.lse);
  for_each_part(call, [&](const Part& part) {
    Tensor out = tokens_of(r.out, call.packed(), part.begin_q, part.begin_q + part.q.size(2));
    for_each_block(part, [&](int64_t begin, int64_t end) {
      const Tensor scores = scores_of(call, part, begin, end).scores;
      Tensor lse = at::logsumexp(scores, {-1});
      if (call.sinks) lse = at::logaddexp(lse, call.sinks->to(at::kDouble).unsqueeze(-1));
      auto [p, rest] = probabilities(call, scores, lse);
      if (const Tensor mask = dropout_factors(call, part, p, begin); mask.defined()) p.mul_(mask);
      out.slice(2, begin, end).copy_(at::matmul(p, part.v));
      lse_of(r.lse, call.packed(), part, begin, end).copy_(lse);
      if (with_rest) lse_of(r.lse_rest, call.packed(), part, begin, end).copy_(rest);
    });
  });
  return r;
}

Gradients backward_double(const Call& call, const Upstream& upstream) {
  Gradients g;
  const auto zeros = [&](Input which, const Tensor& t) {
    if (upstream.mask[which]) g[which] = at::zeros_like(t);
  };
  zeros(kQ, call.q), zeros(kK, call.k), zeros(kV, call.v);
  if (call.bias) zeros(kBias, *call.bias);
  Tensor delta = upstream.grad_out.mul(upstream.out).sum(-1);
  if (call.packed()) delta = delta.t();
  if (upstream.grad_lse) delta = delta - *upstream.grad_lse;
  if (upstream.mask[kSinks]) g[kSinks] = sinks_gradient(call, upstream, delta);

  const bool packed = call.packed();
  for_each_part(call, [&](const Part& part) {
    const int64_t end_q = part.begin_q + part.q.size(2), end_k = part.begin_k + part.k.size(2);
    const Tensor grad_out = tokens_of(upstream.grad_out, packed, part.begin_q, end_q);
    const auto of_key_heads = [&](const Tensor& t) {  // sums over the query heads that share a key-value head
      return t.unflatten(1, {call.k.size(1), -1}).sum(2);
    };
    for_each_block(part, [&](int64_t begin, int64_t end) {
      const Scores s = scores_of(call, part, begin, end);
      const Tensor p = probabilities(call, s.scores, lse_of(upstream.lse, packed, part, begin, end)).p;
      const Tensor grad = grad_out.slice(2, begin, end), mask = dropout_factors(call, part, p, begin);
      Tensor by_p = at::matmul(grad, part.v.transpose(-1, -2));
      if (mask.defined()) by_p.mul_(mask);
      Tensor by_score = p * (by_p - lse_of(delta, packed, part, begin, end).unsqueeze(-1));
      if (g[kV].defined()) {
        const Tensor dropped = mask.defined() ? p * mask : p;
        tokens_of(g[kV], packed, part.begin_k, end_k)
            .add_(of_key_heads(at::matmul(dropped.transpose(-1, -2), grad)));
      }
      if (g[kBias].defined()) {
        Tensor to = packed ? g[kBias].unsqueeze(0) : g[kBias];
        if (packed && to.size(2) != 1) to = to.slice(2, part.begin_q, end_q);
        if (to.size(3) != 1) to = to.slice(3, 0, part.k.size(2));
        add_reduced(bias_rows(to, begin, end), by_score);
      }
      if (s.slope.defined()) by_score.mul_(s.slope);
      by_score.mul_(call.scale);
      if (g[kQ].defined())
        tokens_of(g[kQ], packed, part.begin_q, end_q)
            .slice(2, begin, end)
            .copy_(at::matmul(by_score, part.k));
      if (g[kK].defined()) {
        const Tensor q = part.q.slice(2, begin, end);
        tokens_of(g[kK], packed, part.begin_k, end_k)
            .add_(of_key_heads(at::matmul(by_score.transpose(-1, -2), q)));
      }
    });
  });
  return g;
}

}  // namespace shoestring::attend
