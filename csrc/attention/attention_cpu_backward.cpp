// Backward of attention on the CPU. A task handles some keys of a head: it visits the queries that see them
// and sums the gradients of these keys and values in cache. If there are fewer heads than wanted tasks, the
// keys of a head are divided among several tasks. The gradient of q is a sum over keys, so each of these
// tasks then has its own sum of grad_q. These sums are added at the end in a fixed order.

#include <array>
#include <optional>

#include "attention/attention_cpu.h"

namespace shoestring::attend {
namespace {

// A unit of work of the backward pass. The keys of a head form blocks, which are dealt out to part_count
// tasks in turn. The task handles the blocks part, part + part_count, part + 2 * part_count and so on.
struct BackwardTask {
  const Sequence* sequence;
  int64_t kv_head, part, part_count;
  // Buffer for this task's sums of grad_q: (query heads per key-value head, panels of queries, features with
  // padding, queries of a panel). If null, the task writes the final grad_q itself.
  float* grad_q;
};

// Returns the range of queries that see at least one key of the range `keys`.
Range queries_of(const kernels::AttentionProblem& p, const Sequence& s, Range keys) {
  const int64_t shift = s.keys - s.queries;
  return overlap({0, s.queries}, {keys.begin - p.right - shift, keys.end + p.left - shift});
}

struct Inputs {
  Elements q, k, v, grad_out;
  const float *lse, *lse_rest, *delta;  // lse_rest may be null
};

struct Outputs {
  std::optional<Elements> q, k, v;
  // Sum of the bias's gradient, in the bias's shape and initially zero. It is fp64 if the bias is equal for
  // all queries, because sums over queries may cancel; else fp32.
  Tensor bias;
  // Strides of batch, head, query and key in the bias's gradient; 0 for a dimension of size 1.
  std::array<int64_t, 4> bias_strides{};
};

class Backward {
  // Number of queries in a block. It is the depth of the matrix products that sum over queries.
  static constexpr int64_t kQueries = 128;
  // Limits for the number of keys in a block. kBlockElements limits keys * features, so that each operand
  // takes about 48 KiB.
  static constexpr int64_t kMostKeys = 192, kLeastKeys = 64, kBlockElements = 12288;

 public:
  Backward(const Kernels& kernels, const kernels::AttentionProblem& p, const Inputs& in, const Outputs& out)
      : kernels_(kernels), p_(p), in_(in), out_(out), columns_(kernels.columns), steps_(kernels.steps),
        wide_(kernels.rows), width_(kernels.width_for(p.head_dim)),
        value_width_(kernels.width_for(p.value_dim)), lines_(round_up(p.head_dim, width_)),
        value_lines_(round_up(p.value_dim, value_width_)), most_(keys_of_block(kernels, p)),
        key_panel_(kernels.panel(p.head_dim, wide_)), value_panel_(kernels.panel(p.value_dim, wide_)),
        query_panel_(kernels.panel(kQueries, columns_)), tile_stride_(kernels.panel(kQueries, wide_)),
        keys_(gemm::parts_of(most_, wide_) * key_panel_),
        values_(gemm::parts_of(most_, wide_) * value_panel_),
        key_features_(lines_ / width_ * kernels.panel(most_, width_)),
        key_lines_(kernels.tiles ? round_up(p.head_dim, columns_) : lines_),
        key_value_lines_(kernels.tiles ? round_up(p.value_dim, columns_) : value_lines_),
        query_features_(key_lines_ / width_ * kernels.panel(kQueries, width_)),
        grad_features_(key_value_lines_ / value_width_ * kernels.panel(kQueries, value_width_)),
        query_(kernels.panel(p.head_dim, columns_)), grad_(kernels.panel(p.value_dim, columns_)),
        scores_(round_up(most_ + wide_, wide_) * columns_), by_p_(round_up(most_ + wide_, wide_) * columns_),
        cap_slope_(p.softcap == 0 ? 0 : most_ * columns_), mask_(p.seed == nullptr ? 0 : most_ * columns_),
        added_(p.bias == nullptr ? 0 : most_ * columns_), pairs_(kernels.panel(most_, columns_)),
        probabilities_(gemm::parts_of(most_, columns_) * query_panel_),
        by_score_(gemm::parts_of(most_, columns_) * query_panel_),
        grad_k_(gemm::parts_of(most_, columns_) * key_lines_ * columns_),
        grad_v_(gemm::parts_of(most_, columns_) * key_value_lines_ * columns_),
        rows_(columns_ * round_up(std::max(p.head_dim, p.value_dim), columns_)), lse_(columns_),
        lse_rest_(columns_), delta_(columns_) {}

  // Returns the number of keys in a block.
  static int64_t keys_of_block(const Kernels& kernels, const kernels::AttentionProblem& p) {
    const int64_t fit =
        kBlockElements / std::max(p.head_dim, p.value_dim) / kernels.columns * kernels.columns;
    return std::clamp(fit, kLeastKeys, kMostKeys);
  }

  // Returns the number of fp32 elements in a task's sums of grad_q, for all query heads of a key-value head.
  static int64_t grad_q_size(const Kernels& kernels, const kernels::AttentionProblem& p, const Sequence& s) {
    return p.heads / p.kv_heads * gemm::parts_of(s.queries, kernels.columns) *
           round_up(p.head_dim, kernels.width_for(p.head_dim)) * kernels.columns;
  }

  void run(const BackwardTask& task) {
    const Sequence& s = *task.sequence;
    const int64_t size = out_.q ? grad_q_size(kernels_, p_, s) : 0;
    grad_q_ = task.grad_q;
    if (out_.q && grad_q_ == nullptr) {
      if (own_grad_q_size_ < size) own_grad_q_.emplace(size), own_grad_q_size_ = size;
      grad_q_ = *own_grad_q_;
    }
    if (out_.q) std::fill_n(grad_q_, size, 0.f);
    for (int64_t first = task.part * most_; first < s.keys; first += task.part_count * most_) {
      block(s, task.kv_head, {first, std::min(first + most_, s.keys)});
    }
    if (out_.q && task.grad_q == nullptr) {
      const int64_t group = p_.heads / p_.kv_heads, panels = gemm::parts_of(s.queries, columns_);
      for (int64_t i = 0; i < group * panels; ++i) {
        store_queries(s, task.kv_head * group + i / panels, i % panels, grad_q_ + i * lines_ * columns_);
      }
    }
  }

  // Scales the summed grad_q of a panel of queries and writes it to the output tensor.
  void store_queries(const Sequence& s, int64_t head, int64_t panel, const float* sums) {
    const int64_t first = panel * columns_, count = std::min(columns_, s.queries - first);
    kernels_.store_columns(sums, p_.head_dim, count, p_.scale, *out_.q,
                           out_.q->offset(s, head, s.begin_q + first), rows_);
  }

 private:
  void block(const Sequence& s, int64_t kv_head, Range keys) {
    const int64_t count = keys.end - keys.begin, panels = gemm::parts_of(count, columns_);
    const int64_t group = p_.heads / p_.kv_heads, token = s.begin_k + keys.begin;
    std::fill_n(static_cast<float*>(grad_k_), panels * key_lines_ * columns_, 0.f);
    std::fill_n(static_cast<float*>(grad_v_), panels * key_value_lines_ * columns_, 0.f);
    const Range queries = queries_of(p_, s, keys);
    if (!queries.empty()) {
      const int64_t offset = in_.k.offset(s, kv_head, token);
      kernels_.pack_left({in_.k, offset, count, p_.head_dim}, wide_, keys_);
      kernels_.pack_left({in_.v, in_.v.offset(s, kv_head, token), count, p_.value_dim}, wide_, values_);
      if (out_.q) kernels_.pack_left({in_.k, offset, count, p_.head_dim, true}, width_, key_features_);
      for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        for (int64_t i = queries.begin / kQueries * kQueries; i < queries.end; i += kQueries) {
          add_queries(s, h, {i, std::min(i + kQueries, s.queries)}, keys);
        }
      }
    }
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t first = panel * columns_, some = std::min(columns_, count - first);
      const auto store = [&](const Elements& to, const float* sums, int64_t lines, int64_t size,
                             float scale) {
        store_keys(sums + panel * lines * columns_, size, some, scale, to,
                   to.offset(s, kv_head, token + first));
      };
      if (out_.k) store(*out_.k, grad_k_, key_lines_, p_.head_dim, p_.scale);
      if (out_.v) store(*out_.v, grad_v_, key_value_lines_, p_.value_dim, 1);
    }
  }

  // Writes scale * sums, the gradients of a panel of `count` keys or values, to the tensor `to`. The sums are
  // (features, keys) or, with AMX tiles, (panels of features, keys, features of a panel).
  void store_keys(const float* sums, int64_t features, int64_t count, float scale, const Elements& to,
                  int64_t offset) {
    if (!kernels_.tiles) return kernels_.store_columns(sums, features, count, scale, to, offset, rows_);
    for (int64_t f = 0; f < features; f += columns_) {
      kernels_.store_rows(sums + f * columns_, columns_, std::min(columns_, features - f), count, scale, to,
                          offset + f);
    }
  }

  void add_queries(const Sequence& s, int64_t head, Range queries, Range keys) {
    const int64_t count = queries.end - queries.begin, token = s.begin_q + queries.begin;
    const int64_t key_panels = gemm::parts_of(keys.end - keys.begin, columns_);
    const int64_t q_at = in_.q.offset(s, head, token), grad_at = in_.grad_out.offset(s, head, token);
    const auto pack = [&](const Operand& operand, int64_t width, float* to) {
      kernels_.tiles ? kernels_.pack_right(operand, to) : kernels_.pack_left(operand, width, to);
    };
    if (out_.k) pack({in_.q, q_at, count, p_.head_dim, true}, width_, query_features_);
    if (out_.v) pack({in_.grad_out, grad_at, count, p_.value_dim, true}, value_width_, grad_features_);
    // For each panel of keys, seen_ is the range of queries in this block, in whole panels, that see at least
    // one key of the panel.
    seen_.assign(key_panels, Range{kQueries, 0});
    for (int64_t i = 0; i < count; i += columns_) {
      const Range some{queries.begin + i, std::min(queries.begin + i + columns_, queries.end)};
      const Range visible = overlap(keys_of(p_, s, some), keys);
      if (visible.empty()) continue;
      const Range panels{(visible.begin - keys.begin) / columns_,
                         gemm::parts_of(visible.end - keys.begin, columns_)};
      add_panel(s, head, some, keys, panels, i);
      for (int64_t j = panels.begin; j < panels.end; ++j)
        seen_[j] = {std::min(seen_[j].begin, i), std::min(i + columns_, count)};
    }
    // Adds the product of the queries' features and the panels of keys to `sums`. With AMX tiles, the
    // operands are exchanged, because rows of the tiles of scores are already left operands.
    const auto add = [&](const Buffer& features, int64_t width, int64_t size, int64_t lines,
                         const Buffer& panels, const Buffer& sums) {
      for (int64_t j = 0; j < key_panels; ++j) {
        if (seen_[j].empty()) continue;
        const int64_t from = seen_[j].begin / steps_, depth = seen_[j].end - seen_[j].begin;
        float* to = sums + j * lines * columns_;
        if (!kernels_.tiles) {
          kernels_.multiply(features + from * width, kernels_.panel(count, width), width, size,
                            panels + j * query_panel_ + from * columns_, depth, to, true);
          continue;
        }
        for (int64_t f = 0; f < size; f += columns_) {
          const float* right = features + f / columns_ * kernels_.panel(count, columns_) + from * columns_;
          kernels_.multiply(panels + j * query_panel_ + from * wide_, tile_stride_, wide_, columns_, right,
                            depth, to + f * columns_, true);
        }
      }
    };
    if (out_.v) add(grad_features_, value_width_, p_.value_dim, key_value_lines_, probabilities_, grad_v_);
    if (out_.k) add(query_features_, width_, p_.head_dim, key_lines_, by_score_, grad_k_);
  }

  // Computes the scores of one panel of queries and some panels of the block's keys, and adds what they
  // contribute to the gradients. first_query: offset of the panel's first query in its block of queries.
  void add_panel(const Sequence& s, int64_t head, Range queries, Range block, Range panels,
                 int64_t first_query) {
    const int64_t some = queries.end - queries.begin, token = s.begin_q + queries.begin;
    const int64_t first = panels.begin * columns_;
    const Range keys{block.begin + first, std::min(block.begin + panels.end * columns_, block.end)};
    const int64_t count = keys.end - keys.begin;
    const int64_t row = row_of(p_, s, head, queries.begin);
    std::fill_n(std::copy_n(in_.lse + row, some, static_cast<float*>(lse_)), columns_ - some,
                std::numeric_limits<float>::infinity());
    std::fill_n(std::copy_n(in_.delta + row, some, static_cast<float*>(delta_)), columns_ - some, 0.f);
    const bool has_rest = in_.lse_rest != nullptr;
    if (has_rest) {
      float* rest = lse_rest_;
      std::fill_n(std::copy_n(in_.lse_rest + row, some, rest), columns_ - some, 0.f);
    }

    // Compute the scores and the gradients with respect to the probabilities, each as a matrix (keys,
    // queries).
    kernels_.pack_right({in_.q, in_.q.offset(s, head, token), some, p_.head_dim}, query_);
    kernels_.pack_right({in_.grad_out, in_.grad_out.offset(s, head, token), some, p_.value_dim}, grad_);
    const int64_t tile = first / wide_, skipped = first - tile * wide_, lines = skipped + count;
    kernels_.multiply(keys_ + tile * key_panel_, key_panel_, wide_, lines, query_, p_.head_dim, scores_,
                      false);
    kernels_.multiply(values_ + tile * value_panel_, value_panel_, wide_, lines, grad_, p_.value_dim, by_p_,
                      false);
    float *scores = scores_ + skipped * columns_, *by_p = by_p_ + skipped * columns_;

    const bool capped = p_.softcap != 0, edge = is_edge(p_, s, queries, keys);
    const auto shape = panel_of(p_, s, head, queries.begin);
    if (p_.bias != nullptr) fill_bias(kernels_, p_, s, head, queries, keys, added_);
    const bool adjusts =
        has_rest || edge || p_.bias != nullptr || capped || shape.slope != 0 || !(p_.scale > 0);
    if (adjusts) {
      kernels_.table.adjust(shape, keys.begin, count,
                            p_.bias != nullptr ? static_cast<float*>(added_) : nullptr, edge,
                            has_rest ? static_cast<const float*>(lse_) : nullptr, scores,
                            capped ? static_cast<float*>(cap_slope_) : nullptr);
    }
    float* mask = p_.seed != nullptr ? static_cast<float*>(mask_) : nullptr;
    if (mask != nullptr) {
      kernels_.table.mask(static_cast<uint64_t>(*p_.seed), static_cast<uint32_t>(row), keys.begin, count,
                          p_.threshold, p_.kept, mask);
    }
    const float scale = adjusts ? 1 : p_.scale;
    const float* lse = has_rest ? lse_rest_ : lse_;  // the part that adjust has not subtracted
    const auto tiles_at = [&](const Buffer& to) {
      return kernels::AttentionRows{to + panels.begin * query_panel_ + first_query / steps_ * wide_,
                                    tile_stride_};
    };
    if (kernels_.tiles && !out_.bias.defined() && !capped) {
      kernels_.table.differentiate_tiles(scores, by_p, count, mask, scale, lse, delta_,
                                         tiles_at(probabilities_), tiles_at(by_score_), pairs_);
    } else {
      kernels_.table.differentiate[in_.q.type != at::kFloat](scores, by_p, count, mask, scale, lse, delta_);
      if (out_.bias.defined()) add_to_bias(s, head, queries, keys, by_p);
      if (capped) kernels_.table.multiply(by_p, cap_slope_, count * columns_);
      if (kernels_.tiles) {
        kernels_.table.round_tiles(scores, count, tiles_at(probabilities_), nullptr);
        kernels_.table.round_tiles(by_p, count, tiles_at(by_score_), pairs_);
      }
    }

    if (out_.q) {
      const float* panel = kernels_.tiles ? static_cast<const float*>(pairs_) : by_p;
      if (steps_ > 1 && !kernels_.tiles) {
        kernels_.product.pack_float(by_p, columns_, count, 1, columns_, columns_, pairs_);
        panel = pairs_;
      }
      const int64_t group = p_.heads / p_.kv_heads, of_head = gemm::parts_of(s.queries, columns_);
      float* sums = grad_q_ + (head % group * of_head + queries.begin / columns_) * lines_ * columns_;
      kernels_.multiply(key_features_ + first / steps_ * width_,
                        kernels_.panel(block.end - block.begin, width_), width_, p_.head_dim, panel, count,
                        sums, true);
    }
    if (kernels_.tiles) return;
    for (int64_t j = panels.begin; j < panels.end; ++j) {
      const int64_t from = (j * columns_ - first) * columns_,
                    to = j * query_panel_ + first_query / steps_ * columns_;
      const int64_t lines = std::min(columns_, block.end - block.begin - j * columns_);
      if (out_.v)
        kernels_.product.pack_float(scores + from, lines, columns_, columns_, 1, columns_,
                                    probabilities_ + to);
      if (out_.k)
        kernels_.product.pack_float(by_p + from, lines, columns_, columns_, 1, columns_, by_score_ + to);
    }
  }

  void add_to_bias(const Sequence& s, int64_t head, Range queries, Range keys, const float* by_score) {
    const auto& [batch, by_head, by_query, by_key] = out_.bias_strides;
    const int64_t offset =
        s.batch * batch + head * by_head + (s.begin_q + queries.begin) * by_query + keys.begin * by_key;
    const auto add = [&, by_query = by_query, by_key = by_key](auto* to) {
      for (int64_t i = 0; i < queries.end - queries.begin; ++i) {
        for (int64_t j = 0; j < keys.end - keys.begin; ++j)
          to[i * by_query + j * by_key] += by_score[j * columns_ + i];
      }
    };
    if (out_.bias.scalar_type() == at::kDouble) return add(out_.bias.mutable_data_ptr<double>() + offset);
    add(out_.bias.mutable_data_ptr<float>() + offset);
  }

  const Kernels& kernels_;
  const kernels::AttentionProblem& p_;
  const Inputs& in_;
  const Outputs& out_;
  int64_t columns_, steps_, wide_, width_, value_width_, lines_, value_lines_, most_, key_panel_,
      value_panel_, query_panel_, tile_stride_;
  Buffer keys_, values_, key_features_;
  // numbers of features with padding, of a sum over queries
  int64_t key_lines_, key_value_lines_;
  Buffer query_features_, grad_features_, query_, grad_, scores_, by_p_, cap_slope_, mask_, added_, pairs_,
      probabilities_, by_score_, grad_k_, grad_v_, rows_, lse_, lse_rest_, delta_;
  std::vector<Range> seen_;
  float* grad_q_ = nullptr;
  std::optional<Buffer> own_grad_q_;
  int64_t own_grad_q_size_ = 0;
};

// Wanted number of parallel tasks. It does not depend on the number of threads, because the order of
// summation, and thus the result, must not depend on it.
constexpr int64_t kTasks = 8;
// Limit in bytes for the memory of all partial sums of grad_q.
constexpr int64_t kPartBytes = int64_t{64} << 20;

// Groups of tasks. The groups run one after the other. The tasks within a group may run in parallel, because
// they add to different elements of the bias's gradient.
using Rounds = std::vector<std::vector<BackwardTask>>;

struct Plan {
  Rounds rounds;
  std::optional<Buffer> parts;  // partial sums of grad_q, one for each task that shares a head's keys
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
    const int64_t sequence_parts = parts_of_sequence(s, parts);
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      auto& round = plan.rounds[(by_sequence ? i : 0) * (by_head ? p.kv_heads : 1) + (by_head ? h : 0)];
      for (int64_t part = 0; part < sequence_parts; ++part) {
        const bool apart = grad_q != nullptr && sequence_parts > 1;
        round.push_back({&s, h, part, sequence_parts, apart ? grad_q : nullptr});
        if (apart) grad_q += Backward::grad_q_size(kernels, p, s);
      }
    }
  }
  return plan;
}

// Adds the partial sums of grad_q of the tasks that share a head, in a fixed order, and writes grad_q.
void add_parts(const Kernels& kernels, const kernels::AttentionProblem& p, const Rounds& rounds,
               const Inputs& in, const Outputs& out) {
  std::vector<const BackwardTask*> heads;
  int64_t summands = 0;
  for (const auto& round : rounds) {
    for (const BackwardTask& task : round) {
      if (task.grad_q == nullptr || task.part != 0) continue;
      heads.push_back(&task);
      summands += task.part_count * Backward::grad_q_size(kernels, p, *task.sequence);
    }
  }
  // To read a summand takes as long as eight multiplications.
  share_out(static_cast<int64_t>(heads.size()) * kTasks, 8 * static_cast<double>(summands), [&](auto next) {
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
  // delta is summed in fp32 in the same order as the gradients with respect to the probabilities. If a query
  // sees only one key, delta and the gradient of that key's probability are therefore bitwise equal.
  const auto pack = [&](const Elements& t, int64_t offset, int64_t count, float* into) {
    Kernels::pack(kernels.gemm.fp32, t.type, t.data, offset, count, p.value_dim, t.at.token, 1, columns,
                  into);
  };
  share_out(static_cast<int64_t>(sequences.size()) * p.heads, multiplications_of(p, sequences),
            [&](auto next) {
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
  const Tensor lse_rest = upstream.lse_rest ? upstream.lse_rest->contiguous() : Tensor();
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
    g[kBias] = shared_bias_gradient(call, upstream, delta);
  } else if (upstream.mask[kBias]) {
    const Tensor& t = *call.bias;
    out.bias = at::zeros(t.sizes(), t.options().dtype(t.size(-2) == 1 ? at::kDouble : at::kFloat));
    const auto stride = [&](int64_t dim) { return t.size(dim) == 1 ? 0 : out.bias.stride(dim); };
    out.bias_strides = {call.packed() ? 0 : stride(0), stride(-3), stride(-2), stride(-1)};
  }
  if (upstream.mask[kSinks]) g[kSinks] = sinks_gradient(call, upstream, delta);

  if (out.q || out.k || out.v || out.bias.defined()) {
    const Inputs in{Elements(q),
                    Elements(k),
                    Elements(v),
                    Elements(grad_out),
                    lse.const_data_ptr<float>(),
                    lse_rest.defined() ? lse_rest.const_data_ptr<float>() : nullptr,
                    delta.const_data_ptr<float>()};
    const Plan plan = plan_of(kernels, p, sequences, out);
    const double multiplications =
        5 * multiplications_of(p, sequences) / static_cast<double>(plan.rounds.size());
    for (const auto& round : plan.rounds) {
      share_out(static_cast<int64_t>(round.size()), multiplications, [&](auto next) {
        Backward backward(kernels, p, in, out);
        const TileScope scope(kernels);
        for (int64_t i = next(); i >= 0; i = next()) backward.run(round[i]);
      });
    }
    if (plan.parts) add_parts(kernels, p, plan.rounds, in, out);
  }
  if (out.bias.defined()) g[kBias] = out.bias.to(call.bias->scalar_type());
  return g;
}

}  // namespace shoestring::attend
