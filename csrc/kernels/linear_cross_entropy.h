#pragma once

#include <cstdint>

#include "kernels/capability.h"

namespace shoestring::kernels {

// With z = softcap * tanh(raw / softcap) for a row's logits, lse = log sum exp z, p = exp(z - lse), and w the classes'
// weights (1 where there are none), W their sum:
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

struct LinearCrossEntropyTable {
  // z (vocab): a row of raw logits on entry. Without upstream no gradient is wanted, and z is left as it may be.
  CrossEntropyResult (*row_float)(float* z, int64_t target, const CrossEntropyRule<float>& rule,
                                  const CrossEntropyUpstream* upstream);
  CrossEntropyResult (*row_double)(double* z, int64_t target, const CrossEntropyRule<double>& rule,
                                   const CrossEntropyUpstream* upstream);
  // live[i] = 1 where |z[i]| is not below `least`.
  void (*mark_float)(const float* z, int64_t vocab, float least, uint8_t* live);
  void (*mark_double)(const double* z, int64_t vocab, double least, uint8_t* live);
};

/// A wave of rows on the GPU. T: double for rows_double, else float.
struct CrossEntropyRows {
  void* logits;               // (tokens, stride) T: raw, 16-byte aligned; they stay, unless gradient is the same
  int64_t tokens, vocab;      // what is in a row from vocab on is neither used nor kept
  int64_t stride;             // a multiple of 8
  const int64_t* target;      // (tokens)
  int64_t ignore_index;       // rows with this target: everything is 0 (argmax -1), whatever the logits are
  const void* bias;           // (stride) T, 16-byte aligned, or null
  const void* class_weights;  // (stride) T, 16-byte aligned, 0 from vocab on, or null
  const void* total_weight;   // T: their sum; not null where they are not
  double label_smoothing, z_loss;
  double softcap;             // 0: none
  const void* grad_loss;      // T: u, one for all rows, or (tokens) where its stride is 1; each may be null
  const void* grad_lse;
  const void* grad_entropy;
  int64_t grad_loss_stride, grad_lse_stride, grad_entropy_stride;  // 0 or 1
  double factor;              // what the gradient is multiplied by besides
  void* gradient;             // (tokens, stride) T or 16 bits, 16-byte aligned; may be logits for T; null: not wanted
  unsigned* live;             // (stride / 4), a byte for each class, or null: not 0 where some row's gradient is not below
  double filter_eps;          //   filter_eps (|u| + |v| + |h|); others stay
  void* loss;                 // (tokens) T
  void* lse;                  // (tokens) T
  void* entropy;              // (tokens) T, or null
  int64_t* argmax;            // (tokens), or null
};

/// Each writes the results of every row and, if asked, its gradient by the logits. Returns the launch's error, or null.
struct LinearCrossEntropyCuda {
  const char* (*rows_float)(const CrossEntropyRows& rows, void* stream);
  const char* (*rows_bf16)(const CrossEntropyRows& rows, void* stream);
  const char* (*rows_fp16)(const CrossEntropyRows& rows, void* stream);
  const char* (*rows_double)(const CrossEntropyRows& rows, void* stream);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::LinearCrossEntropyTable, linear_cross_entropy)
