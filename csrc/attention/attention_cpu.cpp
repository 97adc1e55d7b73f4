#include "attention/attention_cpu.h"

#include "gemm/products.h"

namespace shoestring::attend {

std::vector<Sequence> sequences_of(const Call& call, const kernels::AttentionProblem& p) {
  std::vector<Sequence> all;
  if (!call.packed()) {
    for (int64_t b = 0; b < p.batch; ++b) all.push_back({b, b, 0, p.queries, 0, p.keys});
    return all;
  }
  const auto check = [&](const char* name, const int32_t* offsets, int64_t tokens) {
    bool rise = p.batch >= 0 && offsets[0] == 0 && offsets[p.batch] == tokens;
    for (int64_t s = 0; s < p.batch; ++s) rise &= offsets[s] <= offsets[s + 1];
    TORCH_CHECK(rise, kOp, ": ", name, ": expected offsets that rise from 0 to the number of tokens, ",
                tokens, ", received ", call.cu_seqlens_q->numel(), " offsets, the last of which is ",
                p.batch >= 0 ? offsets[p.batch] : 0);
  };
  check("cu_seqlens_q", p.cu_seqlens_q, p.queries);
  check("cu_seqlens_k", p.cu_seqlens_k, p.keys);
  int64_t longest = 0;
  for (int64_t s = 0; s < p.batch; ++s) {
    const int32_t *q = p.cu_seqlens_q + s, *k = p.cu_seqlens_k + s;
    all.push_back({s, 0, q[0], q[1] - q[0], k[0], k[1] - k[0]});
    longest = std::max(longest, all.back().keys);
  }
  TORCH_CHECK(p.bias == nullptr || p.bias_columns == 1 || p.bias_columns >= longest, kOp,
              ": bias: expected at least ", longest, " keys, as the longest sequence has, received ",
              p.bias_columns);
  return all;
}

Range keys_of(const kernels::AttentionProblem& p, const Sequence& s, Range queries) {
  return {std::max<int64_t>(0, s.position(queries.begin) - p.left),
          std::min(s.keys, s.position(queries.end - 1) + p.right + 1)};
}

bool is_edge(const kernels::AttentionProblem& p, const Sequence& s, Range queries, Range keys) {
  return keys.begin < s.position(queries.end - 1) - p.left ||
         keys.end - 1 > s.position(queries.begin) + p.right;
}

Kernels::Kernels(at::ScalarType type)
    : tiles(type == at::kBFloat16 && gemm::multiplies_by_tiles()),
      product(type == at::kBFloat16 && gemm::multiplies_bf16() ? gemm.bf16 : gemm.fp32),
      rows(tiles ? kernels::kAmxLines : gemm.rows), grain(tiles ? kernels::kAmxDepth : gemm.rows) {}

int64_t Kernels::width_for(int64_t lines) const {
  if (tiles) return rows;
  int64_t best = gemm.rows;
  for (int64_t width = gemm.rows; width >= gemm.least_rows; --width) {
    if (round_up(lines, width) < round_up(lines, best)) best = width;
  }
  return best;
}

void Kernels::pack(const kernels::GemmProduct& product, at::ScalarType type, const void* from, int64_t offset,
                   int64_t lines, int64_t depth, int64_t line_stride, int64_t depth_stride, int64_t width,
                   float* to) {
  if (type == at::kFloat) {
    product.pack_float(static_cast<const float*>(from) + offset, lines, depth, line_stride, depth_stride,
                       width, to);
  } else {
    const auto run = type == at::kBFloat16 ? product.pack_bf16 : product.pack_fp16;
    run(static_cast<const uint16_t*>(from) + offset, lines, depth, line_stride, depth_stride, width, to);
  }
}

void Kernels::pack(const Operand& operand, bool left, int64_t width, float* to) const {
  const auto& [from, offset, tokens, features, by_feature] = operand;
  const int64_t lines = by_feature ? features : tokens, depth = by_feature ? tokens : features;
  const int64_t line_stride = by_feature ? 1 : from.at.token, depth_stride = by_feature ? from.at.token : 1;
  if (!tiles) {
    return pack(product, from.type, from.data, offset, lines, depth, line_stride, depth_stride, width, to);
  }
  const auto run = left ? amx.pack_left : amx.pack_right;
  run(reinterpret_cast<const uint16_t*>(from.data) + offset, lines, depth, line_stride, depth_stride, to);
}

void Kernels::store_columns(const float* values, int64_t features, int64_t count, float scale,
                            const Elements& to, int64_t offset, float* rows) const {
  const int64_t stride = round_up(features, columns);
  gemm.fp32.pack_float(values, features, columns, columns, 1, stride, rows);
  store_rows(rows, stride, features, count, scale, to, offset);
}

void Kernels::store_rows(const float* values, int64_t stride, int64_t features, int64_t count, float scale,
                         const Elements& to, int64_t offset) const {
  char* base = const_cast<char*>(to.data);
  if (to.type == at::kFloat) {
    table.store_float(values, stride, count, features, scale, reinterpret_cast<float*>(base) + offset,
                      to.at.token);
  } else {
    const auto run = to.type == at::kBFloat16 ? table.store_bf16 : table.store_fp16;
    run(values, stride, count, features, scale, reinterpret_cast<uint16_t*>(base) + offset, to.at.token);
  }
}

void fill_bias(const Kernels& kernels, const kernels::AttentionProblem& p, const Sequence& s, int64_t head,
               Range queries, Range keys, float* added) {
  const int64_t columns = kernels.columns, count = keys.end - keys.begin, some = queries.end - queries.begin;
  const int64_t offset = s.batch * p.bias_batch + head * p.bias_head +
                         (s.begin_q + queries.begin) * p.bias_query + keys.begin * p.bias_key;
  if (p.bias_type == kernels::BiasType::kBool) {
    const auto* attends = static_cast<const bool*>(p.bias) + offset;
    for (int64_t j = 0; j < count; ++j) {
      for (int64_t i = 0; i < columns; ++i) {
        const bool is = i >= some || attends[i * p.bias_query + j * p.bias_key];
        added[j * columns + i] = is ? 0 : -std::numeric_limits<float>::infinity();
      }
    }
    return;
  }
  const auto type = p.bias_type == kernels::BiasType::kFloat      ? at::kFloat
                    : p.bias_type == kernels::BiasType::kBFloat16 ? at::kBFloat16
                                                                  : at::kHalf;
  // If the bias is equal for all queries, it is packed for one query, and the result is copied to the other
  // queries. If the bias is equal for all keys, the same is done with one key.
  const int64_t lines = p.bias_query == 0 ? 1 : some, depth = p.bias_key == 0 ? 1 : count;
  // Here the lines that pack() packs are queries, and the depth steps are keys. pack() takes a line stride of
  // 1 to mean that the lines are adjacent in memory. If there are several keys, the keys are adjacent, so the
  // line stride is passed as at least 2.
  const int64_t line_stride = depth == 1 && lines > 1 ? p.bias_query : std::max<int64_t>(p.bias_query, 2);
  Kernels::pack(kernels.gemm.fp32, type, p.bias, offset, lines, depth, line_stride, 1, columns, added);
  if (lines < some) {
    for (int64_t j = 0; j < depth; ++j) std::fill_n(added + j * columns, columns, added[j * columns]);
  }
  for (int64_t j = depth; j < count; ++j) std::copy_n(added, columns, added + j * columns);
}

kernels::AttentionPanel panel_of(const kernels::AttentionProblem& p, const Sequence& s, int64_t head,
                                 int64_t first_query) {
  const float slope = p.slopes == nullptr ? 0 : p.slopes[s.number * p.slopes_batch + head];
  return {s.position(first_query), p.left, p.right, p.scale, p.softcap, slope};
}

namespace {

// Number of queries in a task, summed over its heads. A block of keys is packed once for all these queries.
constexpr int64_t kQueries = 256;
// Number of keys in a block, a multiple of the grain of products. The scores of a block fit in the L1 cache.
// With AMX tiles, whose products are as fast as their loads, all operands of a block fit in the L1 cache.
constexpr int64_t kKeys = 168, kTileKeys = 64;

// A unit of work of the forward pass: some query heads that share a key-value head, and a range of their
// queries.
struct ForwardTask {
  const Sequence* sequence;
  int64_t kv_head, first_head, heads;
  Range queries;
};

std::vector<ForwardTask> tasks_of(const kernels::AttentionProblem& p, const std::vector<Sequence>& sequences,
                                  int64_t columns) {
  std::vector<ForwardTask> tasks;
  const int64_t group = p.heads / p.kv_heads, together = std::min(group, kQueries / columns);
  const int64_t chunk = std::max<int64_t>(1, kQueries / columns / together) * columns;
  for (const Sequence& s : sequences) {
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      for (int64_t g = 0; g < group; g += together) {
        // Tasks with the last queries of a sequence come first, because they take longest in causal
        // attention.
        for (int64_t c = gemm::parts_of(s.queries, chunk) - 1; c >= 0; --c) {
          tasks.push_back({&s,
                           h,
                           h * group + g,
                           std::min(together, group - g),
                           {c * chunk, std::min((c + 1) * chunk, s.queries)}});
        }
      }
    }
  }
  return tasks;
}

class Forward {
 public:
  Forward(const Kernels& kernels, const kernels::AttentionProblem& p, const Elements& q, const Elements& k,
          const Elements& v, const Elements& out, float* lse, float* lse_rest)
      : kernels_(kernels), p_(p), q_(q), k_(k), v_(v), out_(out), lse_(lse), lse_rest_(lse_rest),
        columns_(kernels.columns), wide_(kernels.rows), block_(kernels.tiles ? kTileKeys : kKeys),
        value_width_(kernels.width_for(p.value_dim)), value_lines_(round_up(p.value_dim, value_width_)),
        key_panel_(kernels.panel(p.head_dim, wide_)), value_panel_(kernels.panel(block_, value_width_)),
        query_panel_(kernels.panel(p.head_dim, columns_)), most_(std::max<int64_t>(kQueries / columns_, 1)),
        queries_(most_ * query_panel_), keys_(gemm::parts_of(block_, wide_) * key_panel_),
        values_(value_lines_ / value_width_ * value_panel_), scores_(round_up(block_, wide_) * columns_),
        pairs_(kernels::packed_size(round_up(block_, kernels::kAmxDepth), kernels.steps, columns_)),
        added_(p.bias == nullptr ? 0 : block_ * columns_), mask_(p.seed == nullptr ? 0 : block_ * columns_),
        sums_(most_ * value_lines_ * columns_), totals_(most_ * columns_), highest_(most_ * columns_),
        rows_(columns_ * round_up(p.value_dim, columns_)), logs_(columns_), rests_(columns_) {}

  void run(const ForwardTask& task) {
    const Sequence& s = *task.sequence;
    panels_.clear();
    Range keys{s.keys, 0};
    for (int64_t h = 0; h < task.heads; ++h) {
      for (int64_t i = task.queries.begin; i < task.queries.end; i += columns_) {
        Panel panel{task.first_head + h, {i, std::min(i + columns_, task.queries.end)}, {}};
        panel.keys = keys_of(p_, s, panel.queries);
        begin(s, panel, static_cast<int64_t>(panels_.size()));
        if (!panel.keys.empty())
          keys = {std::min(keys.begin, panel.keys.begin), std::max(keys.end, panel.keys.end)};
        panels_.push_back(panel);
      }
    }
    for (int64_t first = keys.begin; first < keys.end; first += block_) {
      const Range block{first, std::min(first + block_, keys.end)};
      const int64_t count = block.end - block.begin, token = s.begin_k + first;
      kernels_.pack_left({k_, k_.offset(s, task.kv_head, token), count, p_.head_dim}, wide_, keys_);
      kernels_.pack_left({v_, v_.offset(s, task.kv_head, token), count, p_.value_dim, true}, value_width_,
                         values_);
      packed_ = kernels_.panel(count, value_width_);
      for (size_t i = 0; i < panels_.size(); ++i) add(s, panels_[i], static_cast<int64_t>(i), block);
    }
    for (size_t i = 0; i < panels_.size(); ++i) end(s, panels_[i], static_cast<int64_t>(i));
  }

 private:
  struct Panel {
    int64_t head;
    Range queries, keys;
  };

  void begin(const Sequence& s, const Panel& panel, int64_t i) {
    kernels_.pack_right({q_, q_.offset(s, panel.head, s.begin_q + panel.queries.begin),
                         panel.queries.end - panel.queries.begin, p_.head_dim},
                        queries_ + i * query_panel_);
    std::fill_n(sums_ + i * value_lines_ * columns_, value_lines_ * columns_, 0.f);
    const bool sink = p_.sinks != nullptr;
    std::fill_n(totals_ + i * columns_, columns_, sink ? 1.f : 0.f);
    std::fill_n(highest_ + i * columns_, columns_,
                sink ? p_.sinks[panel.head] : -std::numeric_limits<float>::infinity());
  }

  // Adds the keys and values of a block to the softmax sums and the output of one panel of queries.
  void add(const Sequence& s, const Panel& panel, int64_t i, Range block) {
    const Range visible = overlap(panel.keys, block);
    if (visible.empty()) return;
    const int64_t skipped = (visible.begin - block.begin) / kernels_.grain * kernels_.grain;
    const Range keys{block.begin + skipped, visible.end};
    const int64_t count = keys.end - keys.begin;
    kernels_.multiply(keys_ + skipped / wide_ * key_panel_, key_panel_, wide_, count,
                      queries_ + i * query_panel_, p_.head_dim, scores_, false);
    const auto edge = is_edge(p_, s, panel.queries, keys);
    if (p_.bias != nullptr) fill_bias(kernels_, p_, s, panel.head, panel.queries, keys, added_);
    const auto shape = panel_of(p_, s, panel.head, panel.queries.begin);
    const bool adjusts =
        edge || p_.bias != nullptr || shape.softcap != 0 || shape.slope != 0 || !(p_.scale > 0);
    if (adjusts) {
      const float* added = p_.bias != nullptr ? static_cast<float*>(added_) : nullptr;
      kernels_.table.adjust(shape, keys.begin, count, added, edge, nullptr, scores_, nullptr);
    }
    if (p_.seed != nullptr) {
      const auto row = static_cast<uint32_t>(row_of(p_, s, panel.head, panel.queries.begin));
      kernels_.table.mask(static_cast<uint64_t>(*p_.seed), row, keys.begin, count, p_.threshold, p_.kept,
                          mask_);
    }
    const float scale = adjusts ? 1 : p_.scale;
    const float* mask = p_.seed != nullptr ? static_cast<float*>(mask_) : nullptr;
    float *sums = sums_ + i * value_lines_ * columns_, *highest = highest_ + i * columns_,
          *totals = totals_ + i * columns_;
    const float* probabilities = scores_;
    if (kernels_.steps > 1) {
      kernels_.table.soften_pairs(scores_, count, mask, scale, highest, totals, sums, p_.value_dim, pairs_);
      probabilities = pairs_;
    } else {
      kernels_.table.soften[q_.type != at::kFloat](scores_, count, mask, scale, highest, totals, sums,
                                                   p_.value_dim);
    }
    kernels_.multiply(values_ + skipped / kernels_.steps * value_width_, packed_, value_width_, p_.value_dim,
                      probabilities, count, sums, true);
  }

  void end(const Sequence& s, const Panel& panel, int64_t i) {
    float* sums = sums_ + i * value_lines_ * columns_;
    const int64_t count = panel.queries.end - panel.queries.begin;
    kernels_.table.finish(highest_ + i * columns_, totals_ + i * columns_, sums, p_.value_dim, logs_,
                          lse_rest_ == nullptr ? nullptr : static_cast<float*>(rests_));
    const int64_t row = row_of(p_, s, panel.head, panel.queries.begin);
    std::copy_n(static_cast<const float*>(logs_), count, lse_ + row);
    if (lse_rest_ != nullptr) std::copy_n(static_cast<const float*>(rests_), count, lse_rest_ + row);
    kernels_.store_columns(sums, p_.value_dim, count, 1, out_,
                           out_.offset(s, panel.head, s.begin_q + panel.queries.begin), rows_);
  }

  const Kernels& kernels_;
  const kernels::AttentionProblem& p_;
  const Elements &q_, &k_, &v_, &out_;
  float *lse_, *lse_rest_;
  int64_t columns_, wide_, block_, value_width_, value_lines_, key_panel_, value_panel_, query_panel_, most_;
  int64_t packed_ = 0;
  Buffer queries_, keys_, values_, scores_, pairs_, added_, mask_, sums_, totals_, highest_, rows_, logs_,
      rests_;
  std::vector<Panel> panels_;
};

}  // namespace

Result forward_cpu(const Call& call, bool with_rest) {
  const auto p = call.problem();
  const auto sequences = sequences_of(call, p);
  const Tensor q = with_features_together(call.q), k = with_features_together(call.k),
               v = with_features_together(call.v);
  Result r{in_huge_pages(call.empty_out()),
           at::empty_symint(call.lse_sizes(), call.q.options().dtype(at::kFloat)),
           {}};
  if (with_rest) r.lse_rest = at::empty_like(r.lse);
  if (r.lse.numel() == 0) return r;
  const Kernels kernels(q.scalar_type());
  const Elements from_q(q), from_k(k), from_v(v), to(r.out);
  float* lse = r.lse.mutable_data_ptr<float>();
  float* lse_rest = with_rest ? r.lse_rest.mutable_data_ptr<float>() : nullptr;
  const auto tasks = tasks_of(p, sequences, kernels.columns);
  share_out(static_cast<int64_t>(tasks.size()), 2 * multiplications_of(p, sequences), [&](auto next) {
    Forward forward(kernels, p, from_q, from_k, from_v, to, lse, lse_rest);
    const TileScope scope(kernels);
    for (int64_t i = next(); i >= 0; i = next()) forward.run(tasks[i]);
  });
  return r;
}

}  // namespace shoestring::attend
