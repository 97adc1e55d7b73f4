#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

// p = softmax of a student's row of logits, q = softmax of its teacher's, m = beta q + (1 - beta) p. The
// divergence, and its gradient by the student's logit j:
//   forward_kl  sum q log(q / p)                                    p_j - q_j
//   reverse_kl  sum p log(p / q)                                    p_j (log(p_j / q_j) - sum p log(p / q))
//   jsd         beta sum q log(q / m) + (1 - beta) sum p log(p / m) (1 - beta) p_j (log(p_j / m_j) - sum p
//   log(p / m))
// A class of probability 0 adds nothing, whatever stands beside it.
enum class Divergence : int { kForwardKl, kReverseKl, kJsd };

/// What every row of a call has in common. T: fp32, or fp64.
template <class T>
struct DistillationRule {
  int64_t vocab;
  const T* student_bias;  // (vocab), or null
  const T* teacher_bias;  // (vocab), or null
  Divergence divergence;
  double beta;
};

struct LinearDistillationTable {
  // The divergence of two rows of raw logits (vocab). If `upstream` is given, student becomes upstream times
  // the gradient; else both are left as they may be.
  double (*row_float)(float* student, float* teacher, const DistillationRule<float>& rule,
                      const double* upstream);
  double (*row_double)(double* student, double* teacher, const DistillationRule<double>& rule,
                       const double* upstream);
};

/// A wave of rows on the GPU. T: double for rows_double, else float.
struct DistillationRows {
  const void* student;       // (tokens, stride) T: raw, 16-byte aligned
  const void* teacher;       // (tokens, stride) T: raw, 16-byte aligned
  int64_t tokens, vocab;     // what is in a row from vocab on is neither used nor kept
  int64_t stride;            // a multiple of 8
  const int64_t* target;     // (tokens), or null
  int64_t ignore_index;      // rows with this target: everything is 0, whatever the logits are
  const void* student_bias;  // (stride) T, 16-byte aligned, or null
  const void* teacher_bias;  // (stride) T, 16-byte aligned, or null
  Divergence divergence;
  double beta;
  const void*
      grad_loss;  // T: one for all rows, or (tokens) where its stride is 1; not null where gradient is not
  int64_t grad_loss_stride;  // 0 or 1
  double factor;             // what the gradient is multiplied by besides
  void* gradient;  // (tokens, stride) T or 16 bits, 16-byte aligned; may be student for T; null: not wanted
  void* loss;      // (tokens) T
};

/// Each writes the loss of every row and, if asked, its gradient by the student's logits. Returns the
/// launch's error, or null.
struct LinearDistillationCuda {
  const char* (*rows_float)(const DistillationRows& rows, void* stream);
  const char* (*rows_bf16)(const DistillationRows& rows, void* stream);
  const char* (*rows_fp16)(const DistillationRows& rows, void* stream);
  const char* (*rows_double)(const DistillationRows& rows, void* stream);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::LinearDistillationTable, linear_distillation)
