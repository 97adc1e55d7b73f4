#pragma once

// Code shared by the forward and the backward of attention on the CPU: it lists the sequences, chooses panel
// sizes and packs operands into panels.

#include <algorithm>
#include <atomic>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include "attention/attention.h"
#include "core/huge_pages.h"
#include "core/threads.h"
#include "gemm/amx_table.h"
#include "gemm/gemm.h"
#include "gemm/gemm_table.h"

namespace shoestring::attend {

inline int64_t round_up(int64_t x, int64_t to) { return gemm::parts_of(x, to) * to; }

struct Sequence {
  int64_t number, batch;  // its index among all sequences, and in the batch: 0 in packed tensors
  int64_t begin_q, queries, begin_k, keys;

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

/// A buffer of uninitialised fp32 elements. It is no tensor, which would take longer to create than its
/// memory.
class Buffer {
 public:
  explicit Buffer(int64_t count) {
    count += kernels::kGemmSlack;
    memory_ = c10::GetCPUAllocator()->allocate(static_cast<size_t>(count) * sizeof(float));
    if (count >= kLarge) in_huge_pages(at::from_blob(memory_.get(), {count}, at::kFloat));
  }
  operator float*() const { return static_cast<float*>(memory_.get()); }

 private:
  static constexpr int64_t kLarge = int64_t{1} << 20;  // smaller buffers hold no whole huge page
  c10::DataPtr memory_;
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

/// A matrix of tokens and features, which starts at element `offset` of a tensor. It is an operand of a
/// matrix product. A line of the operand is a token or, if `by_feature`, a feature.
struct Operand {
  const Elements& from;
  int64_t offset, tokens, features;
  bool by_feature = false;
};

/// The CPU kernels for one dtype, and the panel sizes into which their operands are packed.
struct Kernels {
  explicit Kernels(at::ScalarType type);

  const kernels::GemmTable& gemm = cpu::gemm();
  const kernels::AmxTable& amx = cpu::amx();
  const kernels::AttentionTable& table = cpu::attention();
  const bool tiles;  // whether products run on AMX tiles
  const kernels::GemmProduct& product;
  const int64_t columns = gemm.columns, steps = product.steps;
  const int64_t rows;  // lines of a panel of the left operand, if there are many lines
  // A product may begin with any line of the left operand, or any depth step, that is a multiple of `grain`.
  const int64_t grain;

  /// Returns the number of lines per panel for which packing `lines` lines of the left operand needs the
  /// fewest padding lines.
  int64_t width_for(int64_t lines) const;
  /// Returns the size of a panel in packed elements.
  int64_t panel(int64_t depth, int64_t width) const {
    return tiles ? kernels::amx_size(depth, width) : kernels::packed_size(depth, steps, width);
  }

  /// Packs the left operand of a product into panels of `width` lines.
  void pack_left(const Operand& operand, int64_t width, float* to) const { pack(operand, true, width, to); }
  /// Packs the right operand of a product into panels of `columns` lines.
  void pack_right(const Operand& operand, float* to) const { pack(operand, false, columns, to); }

  /// Computes c (lines, columns) = a b, or c + a b if `add` is true, like Strip of GemmProduct.
  void multiply(const float* a, int64_t a_stride, int64_t width, int64_t lines, const float* b, int64_t depth,
                float* c, bool add) const {
    if (tiles) {
      amx.strip(a, a_stride, lines, b, round_up(depth, kernels::kAmxDepth) / 2, c, add);
    } else {
      product.strip(a, a_stride, width, lines, b, gemm::parts_of(depth, steps), c, 1, add ? 1 : 0);
    }
  }

  static void pack(const kernels::GemmProduct& product, at::ScalarType type, const void* from, int64_t offset,
                   int64_t lines, int64_t depth, int64_t line_stride, int64_t depth_stride, int64_t width,
                   float* to);

  /// Transposes scale * values (features, columns), where a column is a token. Writes the first `count`
  /// tokens to the tensor `to`, starting at element `offset`. rows: a temporary buffer of columns *
  /// round_up(features, columns) elements.
  void store_columns(const float* values, int64_t features, int64_t count, float scale, const Elements& to,
                     int64_t offset, float* rows) const;
  /// Writes scale * values, `count` rows of `features` elements, to the tensor `to`, starting at element
  /// `offset`. The rows of `values` are `stride` elements apart.
  void store_rows(const float* values, int64_t stride, int64_t features, int64_t count, float scale,
                  const Elements& to, int64_t offset) const;

 private:
  void pack(const Operand& operand, bool left, int64_t width, float* to) const;
};

/// Configures the thread's AMX tiles while it exists, if the kernels use them.
class TileScope {
 public:
  explicit TileScope(const Kernels& kernels) : kernels_(kernels) {
    if (kernels.tiles) kernels.amx.begin();
  }
  ~TileScope() {
    if (kernels_.tiles) kernels_.amx.end();
  }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

 private:
  const Kernels& kernels_;
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

/// Returns the number of multiplications of one of attention's products, without regard to masks.
inline double multiplications_of(const kernels::AttentionProblem& p, const std::vector<Sequence>& sequences) {
  double pairs = 0;
  for (const Sequence& s : sequences) pairs += static_cast<double>(s.queries) * static_cast<double>(s.keys);
  return pairs * static_cast<double>(p.heads * p.head_dim);
}

/// Shares `count` items of work, of so many multiplications together, among the threads. Runs body(next) on
/// every thread; each call of next() returns the index of an item that no thread has taken yet, or -1 if
/// there is none.
template <class Body>
void share_out(int64_t count, double multiplications, Body body) {
  std::atomic<int64_t> taken{0};
  const auto next = [&] {
    const int64_t i = taken++;
    return i < count ? i : -1;
  };
  at::parallel_for(0, std::min(count, threads_for(multiplications)), 1,
                   [&](int64_t, int64_t) { body(next); });
}

}  // namespace shoestring::attend
