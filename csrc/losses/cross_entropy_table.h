#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

// With z = softcap * tanh(raw / softcap) for a row's logits, lse = log sum exp z, p = exp(z - lse), and w the
// classes' weights (1 where there are none), W their sum:
//   loss = w_target (1 - s) (lse - z_target) + s / vocab (W lse - sum w z) + z_loss lse^2
//   entropy = lse - sum p z
// The gradient of u loss + v lse + h entropy by z_j is
//   p_j (a + h (lse - entropy - z_j)) - u (s / vocab w_j + [j = target] (1 - s) w_j),
//   a = u (w_target (1 - s) + s / vocab W + 2 z_loss lse) + v.

/// What every row of a call has in common. T: fp32, or fp64.
template <class T>
struct CrossEntropyRule {
  int64_t vocab;
  const T* bias;           // (vocab), or null
  const T* class_weights;  // (vocab), or null
  double total_weight;     // W
  double label_smoothing, z_loss;
  double softcap;          // 0: none
  bool stats;              // entropy and argmax are wanted
  double logit_scale = 1;  // what a row is multiplied by first
};

/// u, v and h of a row.
struct CrossEntropyUpstream {
  double loss, lse, entropy;
};

struct CrossEntropyResult {
  double loss, lse;
  double entropy;  // where wanted, or where upstream has one
  int64_t argmax;  // where wanted: the first of the largest
  double scale;    // the gradient by the raw logits is scale * z, as the call leaves z
};

/// A row of logits in memory, (vocab) X, and its gradient by them: the same memory, or other, or null where
/// it is not wanted. work (vocab): the thread's own; not used for a gradient of X = T. next: the row that the
/// thread is going to read then, or null.
template <class X, class T>
using CrossEntropyLogits = CrossEntropyResult (*)(const X* logits, X* gradient, T* work, int64_t target,
                                                  const CrossEntropyRule<T>& rule,
                                                  const CrossEntropyUpstream& upstream, const X* next);

struct CrossEntropyTable {
  CrossEntropyLogits<float, float> row_float;
  CrossEntropyLogits<uint16_t, float> row_bf16, row_fp16;
  CrossEntropyLogits<double, double> row_double;
};

/// Where rows lie: row r at (r / inner) * outer_stride + (r % inner) * inner_stride elements.
struct CrossEntropyLayout {
  int64_t inner, outer_stride, inner_stride;
};

/// Rows on the GPU. T: double for rows_double, else float. Of a linear layer: a wave of logits T with one
/// stride, a multiple of 8, and so is the room for bias and class weights; 16-byte aligned, and what is in a
/// row from vocab on is neither used nor kept. Of logits that somebody else made: T or 16 bits anywhere, and
/// nothing around them is touched.
struct CrossEntropyRows {
  const void* logits;  // raw; they stay, unless gradient is the same
  CrossEntropyLayout logits_at;
  int64_t tokens, vocab;
  double logit_scale;         // not of a linear layer
  const int64_t* target;      // (tokens)
  int64_t ignore_index;       // rows with this target: everything is 0 (argmax -1), whatever the logits are
  const void* bias;           // (vocab) T, or null: always null but of a linear layer
  const void* class_weights;  // (vocab) T, of a linear layer 0 from vocab on, or null
  const void* total_weight;   // T: their sum; not null where they are not
  double label_smoothing, z_loss;
  double softcap;         // 0: none
  const void* grad_loss;  // T: u, one for all rows, or (tokens) where its stride is 1; each may be null
  const void* grad_lse;
  const void* grad_entropy;
  int64_t grad_loss_stride, grad_lse_stride, grad_entropy_stride;  // 0 or 1
  double factor;   // what the gradient is multiplied by besides
  void* gradient;  // T or 16 bits; may be logits for the same type; null: not wanted
  CrossEntropyLayout gradient_at;
  unsigned* live;     // of a linear layer: a byte for each class, or null: not 0 where some row's gradient is
                      // not below
  double filter_eps;  //   filter_eps (|u| + |v| + |h|); others stay
  void* loss;         // (tokens) T
  void* lse;          // (tokens) T
  void* entropy;      // (tokens) T, or null
  int64_t* argmax;    // (tokens), or null
};

/// Each writes the results of every row and, if asked, its gradient by the logits. Returns the launch's
/// error, or null.
using CrossEntropyLaunch = const char* (*)(const CrossEntropyRows& rows, void* stream);

struct CrossEntropyCuda {
  CrossEntropyLaunch rows_float, rows_bf16, rows_fp16, rows_double;  // of logits and gradient
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::CrossEntropyTable, cross_entropy)
