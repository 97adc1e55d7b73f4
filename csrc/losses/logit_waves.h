#pragma once

// The CUDA part of the losses with an output layer, which processes tokens in waves. A GEMM writes a wave's
// logits in fp32, and a row kernel turns the logits into their gradient. A 16-bit gradient goes to a buffer
// for several waves; an fp32 gradient overwrites the logits. Further GEMMs read the gradient, one chunk at a
// time.
//
// Without `filter`, nothing synchronises with the GPU. The number of ignored tokens is known on the device
// only, so ignored tokens take part in the products. (On the CPU they cost nothing.)

#include <functional>

#include "losses/head.h"

namespace shoestring::losses {

/// Runs the waves of a loss whose logits are logit_scale times those of a head.
class LogitWaves {
 public:
  struct Options {
    double logit_scale;
    bool averaged;  // whether the factors of the losses are about 1 / tokens, as in a mean
    int64_t workspace_mb;
    int64_t buffers = 1;  // buffers for a wave's logits: 1, or 2 if there is a second head
    std::optional<at::Tensor> weight_grad = {};  // fp32 tensor to which the gradient of the weight is added
    // Whether the products for the gradients read only the classes that row kernels mark in live().
    bool filter = false;
  };

  /// `head` has been checked, and has one dimension of tokens. ignored (tokens, 1) bool marks the tokens
  /// whose contents must not affect any result; it may be undefined.
  LogitWaves(const char* op, const Head& head, const at::Tensor& ignored, const Mask& mask, Options options);

  int64_t tokens() const { return head_.hidden.size(0); }
  int64_t vocab() const { return vocab_; }
  /// Returns the stride of the rows of logits and of their gradient. Each row begins at a multiple of 16
  /// bytes.
  int64_t stride() const;
  /// Returns the options of the logits: fp32, or fp64.
  at::TensorOptions compute() const;
  /// Returns the factor by which the row kernel multiplies the gradient, to keep fp16 in range. The products
  /// divide by it again.
  double factor() const { return 1 / scale_; }
  /// Returns t (vocab) padded with zeros to (stride), as row kernels read it. An undefined t stays undefined.
  at::Tensor padded(const std::optional<at::Tensor>& t) const;
  /// Returns rows [begin, begin + count) of t, with zeros in the ignored rows. Multiplying their values by a
  /// zero gradient is not enough, since 0 * inf is NaN.
  at::Tensor counted(const at::Tensor& t, int64_t begin, int64_t count) const;
  /// Returns a buffer for a wave's logits.
  at::Tensor buffer() const;
  /// Computes z (count, stride) = logit_scale * x (count, features) weight^T.
  void write_logits(const at::Tensor& z, const at::Tensor& x, const quantization::BaseWeight& weight) const;

  /// Returns (stride) bytes, which are not 0 for the classes whose gradient matters to some token of the
  /// current chunk. Undefined without `filter`.
  const at::Tensor& live() const { return live_; }

  /// Launches the row kernel on the tokens from `begin` on. Logits and gradient are (count, stride). The
  /// gradient may be the same tensor as the logits, or undefined.
  using StartRows = std::function<void(const at::Tensor& logits, const at::Tensor& gradient, int64_t begin)>;
  Gradients run(const StartRows& start_rows) const;

 private:
  // Returns whether the gradient of the logits has its own buffer.
  bool narrow() const;
  void plan();
  struct Chunk {
    at::Tensor grad, x, low;  // shapes (count, vocab), (count, features), (count, rank); low may be undefined
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
  double scale_ = 1;  // factor by which the products multiply the gradient of the logits
  at::Tensor live_;
  // wave_: number of tokens whose logits exist at a time. chunk_: number of tokens whose gradient of the
  // logits exists at a time, several waves.
  int64_t wave_, chunk_;
};

/// Returns the row kernel of a table for gradients of `dtype`.
template <class Table>
auto rows_of(const Table& table, at::ScalarType dtype) {
  return dtype == at::kDouble     ? table.rows_double
         : dtype == at::kFloat    ? table.rows_float
         : dtype == at::kBFloat16 ? table.rows_bf16
                                  : table.rows_fp16;
}

/// Returns the address of t's data, or null if t is undefined.
inline const void* pointer_to(const at::Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; }
/// Returns the address of a gradient's factor, () or (tokens), from token `begin` on, and sets its stride.
inline const void* factor_from(const at::Tensor& t, int64_t begin, int64_t& stride) {
  stride = t.defined() && t.dim() == 1;
  return pointer_to(stride != 0 ? t.narrow(0, begin, t.size(0) - begin) : t);
}

}  // namespace shoestring::losses
