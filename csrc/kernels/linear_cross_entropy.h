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

/// A wave of rows on the GPU. T: double for rows_double, else float.
struct CrossEntropyRows {
  void* logits;            // (tokens, stride) T: rows of raw logits, 16-byte aligned; they stay, unless gradient is the same
  int64_t tokens, vocab;   // what is in a row from vocab on is neither used nor kept
  int64_t stride;          // a multiple of 8
  const int64_t* target;   // (tokens)
  int64_t ignore_index;    // rows with this target: loss and gradient are 0, whatever the logits are
  const void* bias;        // (stride) T, 16-byte aligned, or null
  const void* factor;      // T: what the gradient is multiplied by, one for all rows, or (tokens)
  bool factor_per_row;
  double label_smoothing;
  double softcap;          // 0: none
  void* gradient;          // (tokens, stride) T or 16 bits, 16-byte aligned; may be logits for T; null: only the loss is
                           // wanted, and factor may be null
  void* loss;              // (tokens) T
};

/// Each writes the loss of every row and, if asked, its gradient by the logits. Returns the launch's error, or null.
struct LinearCrossEntropyCuda {
  const char* (*rows_float)(const CrossEntropyRows& rows, void* stream);
  const char* (*rows_bf16)(const CrossEntropyRows& rows, void* stream);
  const char* (*rows_fp16)(const CrossEntropyRows& rows, void* stream);
  const char* (*rows_double)(const CrossEntropyRows& rows, void* stream);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::LinearCrossEntropyTable, linear_cross_entropy)
