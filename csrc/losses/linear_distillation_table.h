#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

// The divergences of linear_distillation. For one token let p = softmax of the student's row of logits, q =
// softmax of the teacher's row, and m = beta q + (1 - beta) p. Sums are over all classes. The divergences,
// and their gradients with respect to the student's logit j, are:
// - forward_kl: sum q log(q / p), with gradient p_j - q_j;
// - reverse_kl: sum p log(p / q), with gradient p_j (log(p_j / q_j) - sum p log(p / q));
// - jsd: beta sum q log(q / m) + (1 - beta) sum p log(p / m), with gradient (1 - beta) p_j (log(p_j / m_j) -
//   sum p log(p / m)).
// A product of a zero probability and a logarithm counts as 0, even if the logarithm is infinite.
enum class Divergence : int { kForwardKl, kReverseKl, kJsd };

/// The parameters that all rows of one operator call share. T is fp32 or fp64.
template <class T>
struct DistillationRule {
  int64_t vocab;
  const T* student_bias;  // bias of the student, shape (vocab), or null
  const T* teacher_bias;  // bias of the teacher, shape (vocab), or null
  Divergence divergence;
  double beta;
};

struct LinearDistillationTable {
  // Return the divergence of two rows of raw logits (vocab). If `upstream` is given, the row `student`
  // becomes the gradient of the student's logits: upstream times the derivative of the divergence. Otherwise
  // the final contents of both rows are undefined.
  double (*row_float)(float* student, float* teacher, const DistillationRule<float>& rule,
                      const double* upstream);
  double (*row_double)(double* student, double* teacher, const DistillationRule<double>& rule,
                       const double* upstream);
};

/// The arguments of a CUDA kernel that processes several rows of student and teacher. T is double for
/// rows_double, and float otherwise.
struct DistillationRows {
  const void* student;    // student's raw logits, (tokens, stride) of dtype T, aligned to 16 bytes
  const void* teacher;    // teacher's raw logits, (tokens, stride) of dtype T, aligned to 16 bytes
  int64_t tokens, vocab;  // the kernel may overwrite elements of a row from index vocab on
  int64_t stride;         // elements between two rows; a multiple of 8
  const int64_t* target;  // target classes, shape (tokens), or null
  // rows whose target is ignore_index get 0 in loss and gradient, whatever their logits are
  int64_t ignore_index;
  const void* student_bias;  // student's bias, (stride) of dtype T, aligned to 16 bytes, or null
  const void* teacher_bias;  // teacher's bias: `stride` elements of dtype T, aligned to 16 bytes; or null
  Divergence divergence;
  double beta;
  // Upstream gradient of the loss, dtype T: a single number, or one per token, shape (tokens). Not null if
  // `gradient` is not null.
  const void* grad_loss;
  int64_t grad_loss_stride;  // stride of grad_loss: 0 for a single number, 1 for one per token
  double factor;             // the gradient of the logits is multiplied by this number
  // Gradient of the student's logits, (tokens, stride), dtype T or 16 bits, aligned to 16 bytes. It may be
  // the same memory as `student` if the dtype is T. Null if it is not requested.
  void* gradient;
  void* loss;  // loss of each token, shape (tokens), dtype T
};

/// Launchers of the CUDA kernel. The kernel writes the loss of every row and, if requested, its gradient with
/// respect to the student's logits. A launcher returns the error message of the launch, or null.
struct LinearDistillationCuda {
  const char* (*rows_float)(const DistillationRows& rows, void* stream);
  const char* (*rows_bf16)(const DistillationRows& rows, void* stream);
  const char* (*rows_fp16)(const DistillationRows& rows, void* stream);
  const char* (*rows_double)(const DistillationRows& rows, void* stream);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::LinearDistillationTable, linear_distillation)
