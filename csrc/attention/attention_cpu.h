#pragma once

// Code shared by the forward and the backward of attention on the CPU: it lists the sequences, chooses panel
// sizes and packs operands into panels.

#include <algorithm>
#include <atomic>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include "attention/attention.h"
#include "core/huge_pages.h"
#include "gemm/gemm.h"
#include "gemm/gemm_table.h"

namespace shoestring::attend {

inline int64_t round_up(int64_t x, int64_t to) { return gemm::parts_of(x, to) * to; }

struct Sequence {
  int64_t batch, begin_q, queries, begin_k, keys;

  int64_t position(int64_t query) const { return query + keys - queries; }
};

/// Returns all sequences of the batch. Raises if the offsets of packed sequences are invalid.
std::vector<Sequence> sequences_of(const Call& call, const kernels::AttentionProblem& problem);

struct Range {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};
inline Range overlap(Range a, Range b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

/// Returns the range of keys that at least one query of the range `queries` sees.
Range keys_of(const kernels::AttentionProblem& p, const Sequence& s, Range queries);
/// Returns whether a mask is needed: at least one query of the range does not see at least one key of the
/// range.
bool is_edge(const kernels::AttentionProblem& p, const Sequence& s, Range queries, Range keys);

/// A buffer of uninitialised fp32 elements.
class Buffer {
 public:
  explicit Buffer(int64_t count)
      : tensor_(in_huge_pages(at::empty({count + kernels::kGemmSlack}, at::kFloat))),
        data_(tensor_.mutable_data_ptr<float>()) {}
  operator float*() const { return data_; }

 private:
  Tensor tensor_;
  float* data_;
};

/// Data pointer, strides and dtype of an fp32, bf16 or fp16 tensor with contiguous features.
struct Elements {
  explicit Elements(const Tensor& t)
      : data(static_cast<const char*>(t.const_data_ptr())), at(strides_of(t)), type(t.scalar_type()) {}
  const char* data;
  kernels::HeadStrides at;
  at::ScalarType type;

  /// Returns the offset of a token's first feature from the data pointer, in elements.
  int64_t offset(const Sequence& s, int64_t head, int64_t token) const {
    return s.batch * at.batch + head * at.head + token * at.token;
  }
};

/// The CPU kernels for one dtype, and the panel sizes into which their operands are packed.
struct Kernels {
  explicit Kernels(at::ScalarType type);

  const kernels::GemmTable& gemm = cpu::gemm();
  const kernels::GemmProduct& product;
  const kernels::AttentionTable& table = cpu::attention();
  const int64_t columns = gemm.columns, steps = product.steps;

  /// Returns the number of lines per panel for which packing `lines` lines needs the fewest padding lines.
  int64_t width_for(int64_t lines) const;
  int64_t panel(int64_t depth, int64_t width) const { return kernels::packed_size(depth, steps, width); }

  /// pack_tokens and pack_features pack a matrix of tokens and features, which starts at element `offset`,
  /// into panels. A line of a panel is a token in pack_tokens and a feature in pack_features.
  void pack_tokens(const Elements& from, int64_t offset, int64_t lines, int64_t features, int64_t width,
                   float* to) const {
    pack(product, from.type, from.data, offset, lines, features, from.at.token, 1, width, to);
  }
  void pack_features(const Elements& from, int64_t offset, int64_t tokens, int64_t features, int64_t width,
                     float* to) const {
    pack(product, from.type, from.data, offset, features, tokens, 1, from.at.token, width, to);
  }
  static void pack(const kernels::GemmProduct& product, at::ScalarType type, const void* from, int64_t offset,
                   int64_t lines, int64_t depth, int64_t line_stride, int64_t depth_stride, int64_t width,
                   float* to);

  /// Transposes scale * values (features, columns), where a column is a token. Writes the first `count`
  /// tokens to the tensor `to`, starting at element `offset`. rows: a temporary buffer of columns *
  /// round_up(features, columns) elements.
  void store_columns(const float* values, int64_t features, int64_t count, float scale, const Elements& to,
                     int64_t offset, float* rows) const;
};

/// Writes the attention bias for a panel of queries and a block of keys to `added` (keys, columns of the
/// panel).
void fill_bias(const Kernels& kernels, const kernels::AttentionProblem& p, const Sequence& s, int64_t head,
               Range queries, Range keys, float* added);

kernels::AttentionPanel panel_of(const kernels::AttentionProblem& p, const Sequence& s, int64_t head,
                                 int64_t first_query);

/// Returns the index of a query in the flattened lse.
inline int64_t row_of(const kernels::AttentionProblem& p, const Sequence& s, int64_t head, int64_t query) {
  return (s.batch * p.heads + head) * p.queries + s.begin_q + query;
}

/// Shares `count` items of work among the threads. Runs body(next) on every thread; each call of next()
/// returns the index of an item that no thread has taken yet, or -1 if there is none.
template <class Body>
void share_out(int64_t count, Body body) {
  std::atomic<int64_t> taken{0};
  const auto next = [&] {
    const int64_t i = taken++;
    return i < count ? i : -1;
  };
  at::parallel_for(0, std::min<int64_t>(count, at::get_num_threads()), 1,
                   [&](int64_t, int64_t) { body(next); });
}

}  // namespace shoestring::attend
