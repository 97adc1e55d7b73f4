#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

// What of a normalised row is rounded to 16 bits before the weight multiplies it: the row (Llama), nothing
// (Gemma), or the row, what made it and the weight.
enum class Casting : int { kLlama, kGemma, kNone };

// rms_norm and, if centred, layer_norm, of rows that lie one after the other.
struct Norm {
  int64_t features;
  float eps;
  bool centred = false;
  Casting casting = Casting::kGemma;
  float offset = 0;         // added to the weight
  bool wide_weight = true;  // weight, bias and their gradients are fp32, not of x's type
};

// Pointers to the first row; null: none.
struct NormForward {
  const void *x, *residual;  // residual: what is normalised is x + residual, rounded
  const void *weight, *bias;
  void *sum, *y;       // sum: x + residual
  float *mean, *rstd;  // of each row; mean: if centred
};
struct NormBackward {
  const void *grad, *grad_sum;  // grad_sum: added to the gradient
  const void *x, *weight;
  const float *mean, *rstd;
  void* grad_x;
  float *grad_weight, *grad_bias;  // where sums over rows go
};

// Rows of one type on the CPU. Weight, bias and sums over rows are fp32 in an order of their own, `arranged`;
// all of them are there, but for the sums where no vector has a gradient, and a bias and its sums only if
// centred.
struct NormRows {
  // Rows [begin, end).
  using Forward = void (*)(const Norm& norm, const NormForward& io, int64_t begin, int64_t end);
  // The same; grad_weight and grad_bias (features) are added to.
  using Backward = void (*)(const Norm& norm, const NormBackward& io, int64_t begin, int64_t end);
  // A vector (features) of fp32 or of x's type, plus a number, and rounded as casting says.
  using Arrange = void (*)(const void* vector, const Norm& norm, float offset, float* arranged);
  // Sums over rows in order.
  using Restore = void (*)(const float* arranged, const Norm& norm, void* sums);
  Forward forward;
  Backward backward;
  Arrange arrange;
  Restore restore;
};
struct NormTable {
  // Columns [begin, end) of the sum of `rows` rows, `stride` apart, into out; that may be the first row.
  using Columns = void (*)(const float* parts, int64_t rows, int64_t stride, int64_t begin, int64_t end,
                           float* out);
  NormRows of_float, of_bf16, of_fp16;
  Columns sum_rows;
};

// Pointers are on the device; stream is a cudaStream_t. They return an error's text or null.
struct NormCuda {
  using Forward = const char* (*)(const Norm& norm, const NormForward& io, int64_t rows, void* stream);
  // grad_weight and grad_bias: (parts, features), of which each group of threads writes one row; parts <=
  // rows.
  using Backward = const char* (*)(const Norm& norm, const NormBackward& io, int64_t rows, int64_t parts,
                                   void* stream);
  // The sum of `rows` rows of `features`, into out, fp32 or of 16 bits.
  using SumRows = const char* (*)(const float* parts, int64_t rows, int64_t features, void* out,
                                  void* stream);
  Forward forward_float, forward_bf16, forward_fp16;
  Backward backward_float, backward_bf16, backward_fp16;
  SumRows sum_rows_float, sum_rows_bf16, sum_rows_fp16;
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::NormTable, norm)
