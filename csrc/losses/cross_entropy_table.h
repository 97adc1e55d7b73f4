#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

// For a row of logits let z = softcap * tanh(raw / softcap), lse = log sum exp z and p = exp(z - lse). Let s
// be label_smoothing, w the class weights (1 without class weights) and W their sum.
//   loss = w_target (1 - s) (lse - z_target) + s / vocab (W lse - sum w z) + z_loss lse^2
//   entropy = lse - sum p z
// The gradient of u loss + v lse + h entropy with respect to z_j is
//   p_j (a + h (lse - entropy - z_j)) - u (s / vocab w_j + [j = target] (1 - s) w_j),
//   a = u (w_target (1 - s) + s / vocab W + 2 z_loss lse) + v.

/// The parameters that all rows of a call share. T is fp32 or fp64.
template <class T>
struct CrossEntropyRule {
  int64_t vocab;
  const T* bias;           // bias, shape (vocab), or null
  const T* class_weights;  // class weights, shape (vocab), or null
  double total_weight;     // sum of the class weights (W above)
  double label_smoothing, z_loss;
  double softcap;          // softcap of the logits; 0 for none
  bool stats;              // whether entropy and argmax are requested
  double logit_scale = 1;  // first factor of a row's raw logits
};

/// The upstream gradients u, v and h of a row's loss, lse and entropy.
struct CrossEntropyUpstream {
  double loss, lse, entropy;
};

struct CrossEntropyResult {
  double loss, lse;
  double entropy;  // set if stats are requested, or if upstream.entropy is not 0
  int64_t argmax;  // set if stats are requested: the first index of the largest logit
  double scale;    // the gradient with respect to the logits before softcap is scale * z, with the final
                   // contents of z
};

/// Processes a row of logits in memory, (vocab) of dtype X. The gradient may be the same memory, other
/// memory, or null if it is not requested. work (vocab) belongs to the thread; it is not used for a gradient
/// with X = T. `next` is the row that the thread reads next, or null.
template <class X, class T>
using CrossEntropyLogits = CrossEntropyResult (*)(const X* logits, X* gradient, T* work, int64_t target,
                                                  const CrossEntropyRule<T>& rule,
                                                  const CrossEntropyUpstream& upstream, const X* next);

struct CrossEntropyTable {
  CrossEntropyLogits<float, float> row_float;
  CrossEntropyLogits<uint16_t, float> row_bf16, row_fp16;
  CrossEntropyLogits<double, double> row_double;
};

/// The memory layout of the rows: row r is at (r / inner) * outer_stride + (r % inner) * inner_stride
/// elements.
struct CrossEntropyLayout {
  int64_t inner, outer_stride, inner_stride;
};

/// Rows of logits on the GPU. T is double for rows_double, and float otherwise.
///
/// linear_cross_entropy: the rows are a wave of logits of dtype T in a workspace. Their stride is a multiple
/// of 8, and bias and class weights are padded to it. All of them are aligned to 16 bytes. Elements of a row
/// from vocab on are neither used nor kept.
///
/// cross_entropy: the rows are a caller's logits of dtype T or 16 bits, at any address. Memory around them is
/// not touched.
struct CrossEntropyRows {
  const void* logits;  // raw logits; unchanged unless gradient is the same memory
  CrossEntropyLayout logits_at;
  int64_t tokens, vocab;
  double logit_scale;     // not used by linear_cross_entropy
  const int64_t* target;  // target classes, shape (tokens)
  // Rows with this target get 0 in all results (-1 in argmax), whatever their logits are.
  int64_t ignore_index;
  const void* bias;  // bias, shape (vocab), dtype T, or null; always null for cross_entropy
  // Class weights, shape (vocab), dtype T, or null. linear_cross_entropy pads them with zeros.
  const void* class_weights;
  const void* total_weight;  // sum of class_weights, dtype T; null if class_weights is null
  double label_smoothing, z_loss;
  double softcap;  // softcap of the logits; 0 for none
  // Upstream gradients of dtype T, each a single number or (tokens); see the strides below. Null means 0.
  const void* grad_loss;
  const void* grad_lse;
  const void* grad_entropy;
  // Stride 0 for a single number, 1 for (tokens).
  int64_t grad_loss_stride, grad_lse_stride, grad_entropy_stride;
  double factor;  // an additional factor of the gradient
  // The gradient, dtype T or 16 bits. It may be the same memory as the logits if the dtype is the same. Null
  // if it is not requested.
  void* gradient;
  CrossEntropyLayout gradient_at;
  // linear_cross_entropy only: one byte per class, or null. The kernel sets the byte of a class if the
  // gradient of some row is at least filter_eps (|u| + |v| + |h|) in this class. Other bytes do not change.
  unsigned* live;
  double filter_eps;
  void* loss;       // loss of each token, shape (tokens), dtype T
  void* lse;        // log-sum-exp of each token, shape (tokens), dtype T
  void* entropy;    // entropy of each token, shape (tokens), dtype T, or null
  int64_t* argmax;  // argmax of each token, shape (tokens), or null
};

/// Each function writes the results of every row and, if requested, the gradient with respect to its logits.
/// Returns the error message of the launch, or null.
using CrossEntropyLaunch = const char* (*)(const CrossEntropyRows& rows, void* stream);

struct CrossEntropyCuda {
  // Named after the dtype of logits and gradient.
  CrossEntropyLaunch rows_float, rows_bf16, rows_fp16, rows_double;
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::CrossEntropyTable, cross_entropy)
