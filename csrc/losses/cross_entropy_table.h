#pragma once

#include <cstdint>

#include "core/capability.h"
#include "core/host_device.h"

namespace shoestring::kernels {

// Formulas of cross_entropy and linear_cross_entropy. For a row of logits let z = softcap * tanh(raw /
// softcap), lse = log sum exp z and p = exp(z - lse). Let s be label_smoothing, w the class weights (1
// without class weights) and W their sum.
//   loss = w_target (1 - s) (lse - z_target) + s / vocab (W lse - sum w z) + z_loss lse^2
//   entropy = lse - sum p z
// Let u, v and h be the upstream gradients of loss, lse and entropy. Then the gradient of u loss + v lse + h
// entropy with respect to z_j is
//   p_j (a + h (lse - entropy - z_j)) - u (s / vocab w_j + [j = target] (1 - s) w_j),
//   a = u (w_target (1 - s) + s / vocab W + 2 z_loss lse) + v.
// The loss of a row with two targets is the sum of its losses with each of them, times their parts.

/// The options of the formulas.
struct CrossEntropyFormula {
  double label_smoothing = 0;
  double softcap = 0;      // softcap of the logits; 0 for none
  double logit_scale = 1;  // factor of the raw logits, before the CPU kernel adds the bias
  double z_loss = 0;
};

/// The parameters that all rows of one operator call share. T is fp32 or fp64. linear_cross_entropy leaves
/// logit_scale at 1, because its matrix product has applied it.
template <class T>
struct CrossEntropyRule : CrossEntropyFormula {
  int64_t vocab;
  const T* bias;           // bias of the logits, shape (vocab), or null
  const T* class_weights;  // class weights, shape (vocab), or null
  double total_weight;     // sum of the class weights; vocab if there are none
  bool stats;              // whether entropy and argmax of each row are requested
};

/// The targets of a row and their parts of its loss, in [0, 1]. A row with one target has part2 = 0 and
/// target2 = target. A row that is ignored has part = part2 = 0.
template <class T>
struct CrossEntropyTargets {
  int64_t target, target2;
  T part, part2;
};

/// Returns the targets of a row if `target` has the part `mix` of the loss, and target2 the rest. An ignored
/// target has no part. If only one target has a part, or if both are the same class, the result is that of a
/// row with one target, so that its loss has the same bits.
template <class T>
SHOESTRING_HOST_DEVICE CrossEntropyTargets<T> targets_of(int64_t target, int64_t target2, T mix,
                                                         int64_t ignore_index) {
  const T part = target == ignore_index ? 0 : target == target2 ? 1 : mix;
  const T part2 = target2 == ignore_index || target == target2 ? 0 : 1 - mix;
  if (part == 0) return {target2, target2, part2, 0};
  return {target, part2 == 0 ? target : target2, part, part2};
}

/// The upstream gradients of a row's loss, lse and entropy.
struct CrossEntropyUpstream {
  double loss, lse, entropy;
};

struct CrossEntropyResult {
  double loss, lse;
  double entropy;  // the row's entropy; valid if stats are requested, or if upstream.entropy is not 0
  // index of the largest logit, the first if several are equal; valid if stats are requested
  int64_t argmax;
  // Factor that is left out of the gradient: the gradient with respect to the logits before softcap is scale
  // * z, where z are the final contents of the row's buffer.
  double scale;
};

/// Processes one row of logits (vocab) of dtype X, with arithmetic in dtype T. The gradient may be the same
/// memory as the logits, other memory, or null if it is not requested. `work` (vocab) is scratch memory of
/// the thread. It is not used if a gradient is requested and X = T. `next` is the row that the thread reads
/// next, or null.
template <class X, class T>
using CrossEntropyLogits = CrossEntropyResult (*)(const X* logits, X* gradient, T* work,
                                                  const CrossEntropyTargets<double>& targets,
                                                  const CrossEntropyRule<T>& rule,
                                                  const CrossEntropyUpstream& upstream, const X* next);

struct CrossEntropyTable {
  CrossEntropyLogits<float, float> row_float;
  CrossEntropyLogits<uint16_t, float> row_bf16, row_fp16;
  CrossEntropyLogits<double, double> row_double;
};

struct LinearCrossEntropyTable {
  // Compute the loss and statistics of one row. z (vocab) holds the raw logits on entry and, if `upstream` is
  // given, the gradient divided by the result's `scale` on return. Without `upstream`, the final contents of
  // z are undefined.
  CrossEntropyResult (*row_float)(float* z, const CrossEntropyTargets<double>& targets,
                                  const CrossEntropyRule<float>& rule, const CrossEntropyUpstream* upstream);
  CrossEntropyResult (*row_double)(double* z, const CrossEntropyTargets<double>& targets,
                                   const CrossEntropyRule<double>& rule,
                                   const CrossEntropyUpstream* upstream);
  // Rounds factor * z to bf16, and stores the row in the first half of z's memory.
  void (*round_row)(float* z, float factor, int64_t vocab);
  // Set live[i] = 1 for each class i where |z[i]| >= least or z[i] is NaN. Other elements of `live` do not
  // change.
  void (*mark_float)(const float* z, int64_t vocab, float least, uint8_t* live);
  void (*mark_double)(const double* z, int64_t vocab, double least, uint8_t* live);
};

/// The memory layout of the rows of a matrix of logits: row r begins (r / inner) * outer_stride + (r % inner)
/// * inner_stride elements after the first row.
struct CrossEntropyLayout {
  int64_t inner, outer_stride, inner_stride;
  int64_t operator()(int64_t r) const { return r / inner * outer_stride + r % inner * inner_stride; }
};

/// The arguments of a CUDA kernel that processes rows of logits. T is double for rows_double, and float
/// otherwise.
///
/// In linear_cross_entropy, the rows are logits of dtype T that a GEMM has written to a workspace. Their
/// stride is a multiple of 8, and bias and class weights are padded to this length. Logits, bias and class
/// weights are aligned to 16 bytes. The kernel may overwrite elements of a row from index vocab on, and does
/// not use their values.
///
/// In cross_entropy, the rows are a caller's logits of dtype T or 16 bits, at any address. The kernel does
/// not touch memory between rows.
struct CrossEntropyRows : CrossEntropyFormula {
  const void* logits;  // raw logits; not changed unless `gradient` points to the same memory
  CrossEntropyLayout logits_at;
  int64_t tokens, vocab;
  const int64_t* target;  // target classes, shape (tokens)
  // Second target classes, shape (tokens), and the parts of the first targets, dtype T: a single number
  // (stride 0) or one per token (stride 1). Both are null if each row has one target.
  const int64_t* target2;
  const void* mix;
  int64_t mix_stride;
  // Rows whose targets are ignore_index get 0 in all results (-1 in argmax), whatever their logits are.
  int64_t ignore_index;
  const void* bias;  // bias, shape (vocab), dtype T, or null; always null for cross_entropy
  // Class weights, shape (vocab), dtype T, or null. linear_cross_entropy pads them with zeros.
  const void* class_weights;
  const void* total_weight;  // sum of class_weights, dtype T; null if class_weights is null
  // Upstream gradients of dtype T: a single number, or one per token, shape (tokens). Null means 0.
  const void* grad_loss;
  const void* grad_lse;
  const void* grad_entropy;
  // Strides of grad_loss, grad_lse and grad_entropy: 0 for a single number, 1 for one per token.
  int64_t grad_loss_stride, grad_lse_stride, grad_entropy_stride;
  double factor;  // the gradient of the logits is multiplied by this number
  // The gradient of the raw logits, dtype T or 16 bits. It may be the same memory as the logits if both have
  // the same dtype. Null if it is not requested.
  void* gradient;
  CrossEntropyLayout gradient_at;
  // For linear_cross_entropy with filter_eps: one byte per class, or null. The kernel sets the byte of a
  // class if the gradient of some row for this class is large enough. With upstream gradients u, v and h of
  // the row, the threshold is filter_eps * (|u| + |v| + |h|). The kernel does not change other bytes.
  unsigned* live;
  double filter_eps;
  void* loss;       // loss of each token, shape (tokens), dtype T
  void* lse;        // log-sum-exp of each token, shape (tokens), dtype T
  void* entropy;    // entropy of each token, shape (tokens), dtype T, or null
  int64_t* argmax;  // argmax of each token, shape (tokens), or null
};

/// A launcher of the CUDA kernel. The kernel writes the results of every row and, if requested, the gradient
/// with respect to its logits. The launcher returns the error message of the launch, or null.
using CrossEntropyLaunch = const char* (*)(const CrossEntropyRows& rows, void* stream);

struct CrossEntropyCuda {
  // Each function is named after the dtype of logits and gradient.
  CrossEntropyLaunch rows_float, rows_bf16, rows_fp16, rows_double;
};

struct LinearCrossEntropyCuda {
  // Each function is named after the dtype of the gradient. The logits are fp32, or fp64 for rows_double.
  CrossEntropyLaunch rows_float, rows_bf16, rows_fp16, rows_double;
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::CrossEntropyTable, cross_entropy)
SHOESTRING_CPU_TABLE(kernels::LinearCrossEntropyTable, linear_cross_entropy)
