#pragma once

#include "losses/cross_entropy_table.h"

namespace shoestring::kernels {

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

struct LinearCrossEntropyCuda {
  // Each function is named after the dtype of the gradient. The logits are fp32, or fp64 for rows_double.
  CrossEntropyLaunch rows_float, rows_bf16, rows_fp16, rows_double;
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::LinearCrossEntropyTable, linear_cross_entropy)
