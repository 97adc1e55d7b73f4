#pragma once

#include "losses/cross_entropy_table.h"

namespace shoestring::kernels {

struct LinearCrossEntropyTable {
  // z (vocab): a row of raw logits on entry. Without upstream no gradient is wanted, and z is left as it may
  // be.
  CrossEntropyResult (*row_float)(float* z, int64_t target, const CrossEntropyRule<float>& rule,
                                  const CrossEntropyUpstream* upstream);
  CrossEntropyResult (*row_double)(double* z, int64_t target, const CrossEntropyRule<double>& rule,
                                   const CrossEntropyUpstream* upstream);
  // factor z as bf16, in the first half of z's memory.
  void (*round_row)(float* z, float factor, int64_t vocab);
  // live[i] = 1 where |z[i]| is not below `least`.
  void (*mark_float)(const float* z, int64_t vocab, float least, uint8_t* live);
  void (*mark_double)(const double* z, int64_t vocab, double least, uint8_t* live);
};

struct LinearCrossEntropyCuda {
  CrossEntropyLaunch rows_float, rows_bf16, rows_fp16,
      rows_double;  // of the gradient; logits are fp32, or fp64
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::LinearCrossEntropyTable, linear_cross_entropy)
