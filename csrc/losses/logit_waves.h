#pragma once

// Tokens go in waves: a GEMM writes a wave's logits in fp32, and a row kernel turns them into their gradient:
// a 16-bit one goes to a buffer for several waves, fp32 in place. More GEMMs read that, a chunk at a time.
// Nothing waits for the GPU: how many tokens count is known on the device only, so tokens that are ignored
// cost their share of the products (on the CPU they cost nothing).

#include <functional>

#include "losses/head.h"

namespace shoestring::losses {

/// The CUDA side of a loss of logit_scale times a head's logits.
class LogitWaves {
 public:
  struct Options {
    double logit_scale;
    bool averaged;  // the losses' factors are near 1 / tokens
    int64_t workspace_mb;
    int64_t buffers = 1;                         // of a wave's logits: one, or another head's besides
    std::optional<at::Tensor> weight_grad = {};  // what the weight's gradient is added to
    bool filter =
        false;  // the products of the gradients read the classes alone that row kernels mark in live()
  };

  /// head: of one that has been checked, with tokens in one dimension. ignored (tokens, 1) bool: what must
  /// not show, or undefined.
  LogitWaves(const char* op, const Head& head, const at::Tensor& ignored, const Mask& mask, Options options);

  int64_t tokens() const { return head_.hidden.size(0); }
  int64_t vocab() const { return vocab_; }
  /// Of the rows of logits and of their gradient: each begins at a multiple of 16 bytes.
  int64_t stride() const;
  /// Of the logits: fp32, or fp64.
  at::TensorOptions compute() const;
  /// What the row kernel multiplies the gradient by, for fp16's sake; the products take it back.
  double factor() const { return 1 / scale_; }
  /// t (vocab), or undefined, as row kernels read it: (stride), 0 from vocab on.
  at::Tensor padded(const std::optional<at::Tensor>& t) const;
  /// Rows [begin, begin + count) of t, those that are ignored zero: what they hold must not show, and 0 * inf
  /// would.
  at::Tensor counted(const at::Tensor& t, int64_t begin, int64_t count) const;
  /// A buffer for a wave's logits.
  at::Tensor buffer() const;
  /// z (count, stride) = logit_scale x (count, features) weight^T.
  void write_logits(const at::Tensor& z, const at::Tensor& x, const quantization::BaseWeight& weight) const;

  /// (stride) bytes: not 0 where a class's gradient matters to a token of the chunk at hand; undefined
  /// without filter.
  const at::Tensor& live() const { return live_; }

  /// Starts the row kernel on tokens from `begin` on: logits and gradient (count, stride). The latter may be
  /// the former, or undefined.
  using StartRows = std::function<void(const at::Tensor& logits, const at::Tensor& gradient, int64_t begin)>;
  Gradients run(const StartRows& start_rows) const;

 private:
  // The gradient of the logits is in a buffer of its own.
  bool narrow() const;
  void plan();
  struct Chunk {
    at::Tensor grad, x, low;  // (count, vocab), (count, features), (count, rank) or undefined
    int64_t begin;
  };
  void add_gradients(const Chunk& chunk, const quantization::BaseWeight& weight, const at::Tensor& up,
                     Gradients& sums) const;
  void add_live_gradients(const Chunk& chunk, const at::Tensor& classes, const at::Tensor& up,
                          Gradients& sums) const;

  const char* op_;
  const Head& head_;
  const at::Tensor ignored_;
  const Mask mask_;
  const Options options_;
  const int64_t vocab_;
  double scale_ = 1;  // what the products multiply the logits' gradient by
  at::Tensor live_;
  int64_t wave_,
      chunk_;  // tokens that have logits at a time, and those that have a gradient of them: several waves
};

/// That of a table's row kernels whose gradient is of `dtype`.
template <class Table>
auto rows_of(const Table& table, at::ScalarType dtype) {
  return dtype == at::kDouble     ? table.rows_double
         : dtype == at::kFloat    ? table.rows_float
         : dtype == at::kBFloat16 ? table.rows_bf16
                                  : table.rows_fp16;
}

/// The address of t's data, or null where there is none.
inline const void* pointer_to(const at::Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; }
/// A factor of the gradients () or (tokens), from token `begin` on, and its stride.
inline const void* factor_from(const at::Tensor& t, int64_t begin, int64_t& stride) {
  stride = t.defined() && t.dim() == 1;
  return pointer_to(stride != 0 ? t.narrow(0, begin, t.size(0) - begin) : t);
}

}  // namespace shoestring::losses
