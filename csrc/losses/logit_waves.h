#pragma once

// The CUDA part of linear_cross_entropy and linear_distillation, which processes tokens in waves (groups of
// consecutive tokens). A GEMM writes a wave's logits in fp32, and a row kernel computes their gradient. A
// 16-bit gradient goes to a buffer for a chunk of several waves; an fp32 gradient overwrites the logits.
// After each chunk, further GEMMs read the gradient.
//
// Without Options::filter, nothing synchronises with the GPU. The number of ignored tokens is known on the
// device only, so the matrix products include ignored tokens. (The CPU implementation skips them.)

#include <functional>

#include "losses/head.h"

namespace shoestring::losses {

/// Runs a loss whose logits are logit_scale times the output of `head`, for one group of tokens (a wave) at a
/// time.
class LogitWaves {
 public:
  struct Options {
    double logit_scale;
    bool averaged;  // whether the upstream gradients of the tokens' losses are about 1 / tokens, as in a mean
    int64_t workspace_mb;
    // number of buffers for a wave's logits: 1, or 2 if the loss has a second head (a teacher)
    int64_t buffers = 1;
    std::optional<at::Tensor> weight_grad = {};  // fp32 tensor to which the gradient of the weight is added
    // Whether the matrix products for the gradients skip the classes that the row kernel has not marked in
    // live().
    bool filter = false;
  };

  /// `head` must have been checked, with hidden of shape (tokens, features). ignored (tokens, 1) bool marks
  /// the tokens whose values must not affect any result; it may be undefined.
  LogitWaves(const char* op, Head head, const at::Tensor& ignored, const Mask& mask, Options options);

  int64_t tokens() const { return head_.hidden.size(0); }
  int64_t vocab() const { return vocab_; }
  /// Returns the number of elements between two rows of the logits and of their gradient. It is a multiple of
  /// 8, so that each row begins at a multiple of 16 bytes.
  int64_t stride() const;
  /// Returns the tensor options of the logits: dtype fp32, or fp64 for fp64 inputs.
  at::TensorOptions compute() const;
  /// Returns the factor by which the row kernel multiplies the gradient of the logits, to keep fp16 in range.
  /// The matrix products divide by the factor again.
  double factor() const { return 1 / scale_; }
  /// Returns t (vocab) converted to the dtype of the logits and padded with zeros to (stride()), as row
  /// kernels read it. An undefined t stays undefined.
  at::Tensor padded(const std::optional<at::Tensor>& t) const;
  /// Returns rows [begin, begin + count) of t, with zeros in the rows of ignored tokens. A zero gradient of
  /// the logits alone would not exclude such a row, since 0 * inf is NaN.
  at::Tensor counted(const at::Tensor& t, int64_t begin, int64_t count) const;
  /// Returns a buffer for the logits of one wave.
  at::Tensor buffer() const;
  /// Computes the logits z (count, stride()) = logit_scale * x (count, features) weight^T.
  void write_logits(const at::Tensor& z, const at::Tensor& x, const quantization::BaseWeight& weight) const;

  /// Returns one byte per class, shape (stride()). The row kernel sets a class's byte to nonzero if some
  /// token of the current chunk has a gradient for it that is not negligible. Undefined without
  /// Options::filter.
  const at::Tensor& live() const { return live_; }

  /// Launches the row kernel on the logits of a wave, whose first token is number `begin`. Logits and
  /// gradient have the shape (count, stride()). The gradient may be the same tensor as the logits, or
  /// undefined.
  using StartRows = std::function<void(const at::Tensor& logits, const at::Tensor& gradient, int64_t begin)>;
  Gradients run(const StartRows& start_rows) const;

 private:
  // Returns whether the gradient of the logits is 16-bit and has its own buffer, instead of overwriting the
  // fp32 logits.
  bool narrow() const;
  void plan();
  struct Chunk {
    // shapes: gradient of the logits (count, vocab), hidden (count, features), lora_hidden (count, rank) or
    // undefined
    at::Tensor grad, x, lora_hidden;
    int64_t begin;
  };
  void add_gradients(const Chunk& chunk, const quantization::BaseWeight& weight, const at::Tensor& lora_B,
                     Gradients& sums) const;
  void add_live_gradients(const Chunk& chunk, const at::Tensor& classes, const at::Tensor& lora_B,
                          Gradients& sums) const;

  const char* op_;
  const Head head_;
  const at::Tensor ignored_;
  const Mask mask_;
  const Options options_;
  const int64_t vocab_;
  double scale_ = 1;  // factor by which the matrix products multiply the gradient of the logits
  at::Tensor live_;
  // wave_: number of tokens whose logits are in memory at a time. chunk_: number of tokens for which the
  // gradient of the logits is in memory at a time; a chunk consists of one or more waves.
  int64_t wave_, chunk_;
};

/// Returns the function in the kernel table `table` that launches the row kernel for gradients of `dtype`.
template <class Table>
auto rows_of(const Table& table, at::ScalarType dtype) {
  return dtype == at::kDouble     ? table.rows_double
         : dtype == at::kFloat    ? table.rows_float
         : dtype == at::kBFloat16 ? table.rows_bf16
                                  : table.rows_fp16;
}

/// Returns the address of t's data, or null if t is undefined.
inline const void* pointer_to(const at::Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; }
/// Returns the address of element number `i` of a contiguous tensor, or null if t is undefined.
inline const void* element_of(const at::Tensor& t, int64_t i) {
  return t.defined() ? static_cast<const char*>(t.const_data_ptr()) + i * t.element_size() : nullptr;
}
/// Returns the address of the value for token number `begin`. t has a value for each token, contiguous, or is
/// a scalar. Sets `stride` to 1 if t has one value per token, and to 0 otherwise.
inline const void* factor_from(const at::Tensor& t, int64_t begin, int64_t& stride) {
  stride = t.defined() && t.dim() != 0;
  return element_of(t, stride * begin);
}

}  // namespace shoestring::losses
