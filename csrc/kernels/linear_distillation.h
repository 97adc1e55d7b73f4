#pragma once

#include <cstdint>

#include "kernels/capability.h"

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

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::LinearDistillationTable, linear_distillation)
