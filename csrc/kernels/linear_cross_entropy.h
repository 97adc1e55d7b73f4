#pragma once

#include <cstdint>

#include "kernels/capability.h"

namespace shoestring::kernels {

struct CrossEntropyRow {
  int64_t vocab;
  int64_t target;
  double label_smoothing;
  double softcap;  // 0: none
  bool gradient;   // false: z is left as it may be, and only the loss is wanted
};

struct CrossEntropyResult {
  double loss;
  double scale;  // the gradient of the loss by the logits is scale * z, as the call leaves z
};

struct LinearCrossEntropyTable {
  // z (vocab): a row of raw logits on entry. bias (vocab) may be null.
  CrossEntropyResult (*row_float)(float* z, const float* bias, const CrossEntropyRow& row);
  CrossEntropyResult (*row_double)(double* z, const double* bias, const CrossEntropyRow& row);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::LinearCrossEntropyTable, linear_cross_entropy)
