#include "attention/attention_cpu_backward.h"

namespace shoestring::attend {
namespace {

// Number of parallel tasks to aim for. It does not depend on the number of threads, because no sum may depend
// on that number.
constexpr int64_t kTasks = 8;
// Limit in bytes for all partial sums of grad_q. Each part of the keys has a partial sum.
constexpr int64_t kPartBytes = int64_t{64} << 20;

// Rounds run one after the other. The tasks of one round may run in parallel, because they add to different
// elements of the bias's gradient.
using Rounds = std::vector<std::vector<BackwardTask>>;

struct Plan {
  Rounds rounds;
  std::optional<Buffer> parts;  // partial sums of grad_q
};

Plan plan_of(const Kernels& kernels, const kernels::AttentionProblem& p,
             const std::vector<Sequence>& sequences, const Outputs& out) {
  const auto& strides = out.bias_strides;
  const bool sums_bias = out.bias.defined();
  const bool by_sequence = sums_bias && (p.cu_seqlens_q == nullptr ? strides[0] : strides[2]) == 0;
  const bool by_head = sums_bias && strides[1] == 0;
  const int64_t count = static_cast<int64_t>(sequences.size());
  Plan plan;
  plan.rounds.resize((by_sequence ? count : 1) * (by_head ? p.kv_heads : 1));

  const int64_t block = Backward::keys_of_block(kernels, p);
  const int64_t at_once = std::max<int64_t>(1, (by_sequence ? 1 : count) * (by_head ? 1 : p.kv_heads));
  const auto parts_of_sequence = [&](const Sequence& s, int64_t parts) {
    return std::clamp(gemm::parts_of(s.keys, block), int64_t{1}, parts);
  };
  const auto bytes = [&](int64_t parts) {
    int64_t total = 0;
    for (const Sequence& s : sequences) {
      if (parts_of_sequence(s, parts) == 1) continue;
      total += parts_of_sequence(s, parts) * p.kv_heads * Backward::grad_q_size(kernels, p, s) *
               static_cast<int64_t>(sizeof(float));
    }
    return total;
  };
  int64_t parts = gemm::parts_of(kTasks, at_once);
  while (out.q && parts > 1 && bytes(parts) > kPartBytes) --parts;
  float* grad_q = nullptr;
  if (out.q && parts > 1) {
    plan.parts.emplace(bytes(parts) / static_cast<int64_t>(sizeof(float)));
    grad_q = *plan.parts;
  }
  for (int64_t i = 0; i < count; ++i) {
    const Sequence& s = sequences[i];
    const int64_t mine = parts_of_sequence(s, parts);
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      auto& round = plan.rounds[(by_sequence ? i : 0) * (by_head ? p.kv_heads : 1) + (by_head ? h : 0)];
      for (int64_t part = 0; part < mine; ++part) {
        const bool apart = grad_q != nullptr && mine > 1;
        round.push_back({&s, h, part, mine, apart ? grad_q : nullptr});
        if (apart) grad_q += Backward::grad_q_size(kernels, p, s);
      }
    }
  }
  return plan;
}

// Adds the partial sums of grad_q in the order of the parts, and stores each panel of queries.
void add_parts(const Kernels& kernels, const kernels::AttentionProblem& p, const Rounds& rounds,
               const Inputs& in, const Outputs& out) {
  std::vector<const BackwardTask*> heads;
  for (const auto& round : rounds) {
    for (const BackwardTask& task : round) {
      if (task.grad_q != nullptr && task.part == 0) heads.push_back(&task);
    }
  }
  share_out(static_cast<int64_t>(heads.size()) * kTasks, [&](auto next) {
    Backward backward(kernels, p, in, out);
    for (int64_t i = next(); i >= 0; i = next()) {
      const BackwardTask& task = *heads[i / kTasks];
      const Sequence& s = *task.sequence;
      const int64_t group = p.heads / p.kv_heads, panels = gemm::parts_of(s.queries, kernels.columns),
                    all = group * panels;
      const int64_t whole = Backward::grad_q_size(kernels, p, s), size = all == 0 ? 0 : whole / all;
      for (int64_t j = i % kTasks * all / kTasks; j < (i % kTasks + 1) * all / kTasks; ++j) {
        float* sums = task.grad_q + j * size;
        for (int64_t part = 1; part < task.part_count; ++part) {
          const float* more = sums + part * whole;
          for (int64_t e = 0; e < size; ++e) sums[e] += more[e];
        }
        backward.store_queries(s, task.kv_head * group + j / panels, j % panels, sums);
      }
    }
  });
}

Tensor delta_of(const Kernels& kernels, const kernels::AttentionProblem& p,
                const std::vector<Sequence>& sequences, const Elements& grad_out, const Elements& out,
                const Upstream& upstream) {
  Tensor delta = at::empty(upstream.lse.sizes(), upstream.lse.options());
  float* to = delta.mutable_data_ptr<float>();
  const int64_t columns = kernels.columns, panel = kernels::packed_size(p.value_dim, 1, columns);
  // Uses fp32 and the summation order of the gradients of the probabilities. If a query sees only one key,
  // delta and the gradient of that key's probability are therefore the same number.
  const auto pack = [&](const Elements& t, int64_t offset, int64_t count, float* into) {
    Kernels::pack(kernels.gemm.fp32, t.type, t.data, offset, count, p.value_dim, t.at.token, 1, columns,
                  into);
  };
  share_out(static_cast<int64_t>(sequences.size()) * p.heads, [&](auto next) {
    const Buffer left(panel), right(panel), sums(columns);
    for (int64_t i = next(); i >= 0; i = next()) {
      const Sequence& s = sequences[i / p.heads];
      const int64_t head = i % p.heads;
      for (int64_t first = 0; first < s.queries; first += columns) {
        const int64_t count = std::min(columns, s.queries - first), token = s.begin_q + first;
        pack(grad_out, grad_out.offset(s, head, token), count, left);
        pack(out, out.offset(s, head, token), count, right);
        kernels.table.dots(left, right, p.value_dim, sums);
        std::copy_n(static_cast<float*>(sums), count, to + row_of(p, s, head, first));
      }
    }
  });
  if (upstream.grad_lse) delta.sub_(*upstream.grad_lse);
  return delta;
}

}  // namespace

Gradients backward_cpu(const Call& call, const Upstream& upstream) {
  const auto p = call.problem();
  const auto sequences = sequences_of(call, p);
  const Kernels kernels(call.q.scalar_type());
  const Tensor q = with_features_together(call.q), k = with_features_together(call.k),
               v = with_features_together(call.v);
  const Tensor grad_out = with_features_together(upstream.grad_out), lse = upstream.lse.contiguous();
  const Tensor out_rows = with_features_together(upstream.out);
  const Tensor delta = delta_of(kernels, p, sequences, Elements(grad_out), Elements(out_rows), upstream);

  Gradients g;
  const auto like = [&](Input which, const Tensor& t, std::optional<Elements>& to) {
    if (!upstream.mask[which]) return;
    g[which] = in_huge_pages(at::empty_like(t));
    if (g[which].stride(-1) != 1) g[which] = at::empty(t.sizes(), t.options());
    to.emplace(g[which]);
  };
  Outputs out;
  like(kQ, call.q, out.q), like(kK, call.k, out.k), like(kV, call.v, out.v);
  if (upstream.mask[kBias] && has_shared_bias(call)) {
    g[kBias] = shared_bias_gradient(call, lse, delta, upstream.grad_lse);
  } else if (upstream.mask[kBias]) {
    const Tensor& t = *call.bias;
    out.bias = at::zeros(t.sizes(), t.options().dtype(t.size(-2) == 1 ? at::kDouble : at::kFloat));
    const auto stride = [&](int64_t dim) { return t.size(dim) == 1 ? 0 : out.bias.stride(dim); };
    out.bias_strides = {call.packed() ? 0 : stride(0), stride(-3), stride(-2), stride(-1)};
  }
  if (upstream.mask[kSinks]) g[kSinks] = sinks_gradient(call, lse, delta);

  if (out.q || out.k || out.v || out.bias.defined()) {
    const Inputs in{Elements(q),
                    Elements(k),
                    Elements(v),
                    Elements(grad_out),
                    lse.const_data_ptr<float>(),
                    delta.const_data_ptr<float>()};
    const Plan plan = plan_of(kernels, p, sequences, out);
    for (const auto& round : plan.rounds) {
      share_out(static_cast<int64_t>(round.size()), [&](auto next) {
        Backward backward(kernels, p, in, out);
        for (int64_t i = next(); i >= 0; i = next()) backward.run(round[i]);
      });
    }
    if (plan.parts) add_parts(kernels, p, plan.rounds, in, out);
  }
  if (out.bias.defined()) g[kBias] = out.bias.to(call.bias->scalar_type());
  return g;
}

}  // namespace shoestring::attend
