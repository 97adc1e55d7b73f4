#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

// Let p = softmax of the student's row of logits, q = softmax of the teacher's row, and m = beta q + (1 -
// beta) p. The divergences, and their gradients with respect to the student's logit j:
// - forward_kl: sum q log(q / p), with gradient p_j - q_j;
// - reverse_kl: sum p log(p / q), with gradient p_j (log(p_j / q_j) - sum p log(p / q));
// - jsd: beta sum q log(q / m) + (1 - beta) sum p log(p / m), with gradient (1 - beta) p_j (log(p_j / m_j) -
//   sum p log(p / m)).
// A term with a factor of probability 0 is 0, even if its logarithm is infinite.
enum class Divergence : int { kForwardKl, kReverseKl, kJsd };

/// The parameters that all rows of a call share. T is fp32 or fp64.
template <class T>
struct DistillationRule {
  int64_t vocab;
  const T* student_bias;  // bias of the student, shape (vocab), or null
  const T* teacher_bias;  // bias of the teacher, shape (vocab), or null
  Divergence divergence;
  double beta;
};

struct LinearDistillationTable {
  // Return the divergence of two rows of raw logits (vocab). With `upstream`, `student` becomes upstream
  // times its gradient. Otherwise the final contents of both rows are undefined.
  double (*row_float)(float* student, float* teacher, const DistillationRule<float>& rule,
                      const double* upstream);
  double (*row_double)(double* student, double* teacher, const DistillationRule<double>& rule,
                       const double* upstream);
};

/// A wave of rows on the GPU. T is double for rows_double, and float otherwise.
struct DistillationRows {
  const void* student;       // (tokens, stride) T: raw logits, aligned to 16 bytes
  const void* teacher;       // (tokens, stride) T: raw logits, aligned to 16 bytes
  int64_t tokens, vocab;     // elements of a row from vocab on are neither used nor kept
  int64_t stride;            // elements between two rows; a multiple of 8
  const int64_t* target;     // target classes, shape (tokens), or null
  int64_t ignore_index;      // rows with this target get 0 everywhere, whatever their logits are
  const void* student_bias;  // (stride) T, aligned to 16 bytes, or null
  const void* teacher_bias;  // (stride) T, aligned to 16 bytes, or null
  Divergence divergence;
  double beta;
  // Upstream gradient of dtype T: a single number, or (tokens) if its stride is 1. Not null if `gradient` is
  // not null.
  const void* grad_loss;
  int64_t grad_loss_stride;  // stride 0 for a single number, 1 for (tokens)
  double factor;             // an additional factor of the gradient
  // Gradient of the student's logits, (tokens, stride), dtype T or 16 bits, aligned to 16 bytes. It may be
  // the same memory as `student` if the dtype is T. Null if it is not requested.
  void* gradient;
  void* loss;  // loss of each token, shape (tokens), dtype T
};

/// Each function writes the loss of every row and, if requested, its gradient with respect to the student's
/// logits. Returns the error message of the launch, or null.
struct LinearDistillationCuda {
  const char* (*rows_float)(const DistillationRows& rows, void* stream);
  const char* (*rows_bf16)(const DistillationRows& rows, void* stream);
  const char* (*rows_fp16)(const DistillationRows& rows, void* stream);
  const char* (*rows_double)(const DistillationRows& rows, void* stream);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::LinearDistillationTable, linear_distillation)
