#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

// Values that are rounded to 16 bits before the weight multiplies the normalised row. kLlama: the normalised
// row. kGemma: none. kNone: the row, the reciprocal root that normalised it, and the weight.
enum class Casting : int { kLlama, kGemma, kNone };

// Arguments of rms_norm or, if centred, of layer_norm, over contiguous rows.
struct Norm {
  int64_t features;
  float eps;
  bool centred = false;
  Casting casting = Casting::kGemma;
  float offset = 0;         // number that is added to the weight
  bool wide_weight = true;  // weight, bias and their gradients are fp32; false: x's dtype
};

// Pointers to the first row. A pointer is null if its tensor is not given.
struct NormForward {
  const void *x, *residual;  // with a residual, x + residual is rounded and then normalised
  const void *weight, *bias;
  void *sum, *y;       // sum: x + residual
  float *mean, *rstd;  // one number for each row; mean only if centred
};
struct NormBackward {
  const void *grad, *grad_sum;  // grad_sum is added to grad_x
  const void *x, *weight;
  const float *mean, *rstd;
  void* grad_x;
  float *grad_weight, *grad_bias;  // sums over rows: the gradients of weight and bias
};

// CPU kernels for rows of one dtype. Weight, bias and sums over rows are fp32, in the element order that
// `arrange` writes. The weight is always given, and the bias only if centred. The sums are null if no vector
// needs a gradient; the sums of the bias exist only if centred.
struct NormRows {
  // Normalises rows [begin, end).
  using Forward = void (*)(const Norm& norm, const NormForward& io, int64_t begin, int64_t end);
  // Computes grad_x for rows [begin, end), and adds their share to grad_weight and grad_bias (features).
  using Backward = void (*)(const Norm& norm, const NormBackward& io, int64_t begin, int64_t end);
  // Writes a vector (features) of fp32 or of x's dtype, plus `offset`, in the order of the kernels. Rounds as
  // `casting` says.
  using Arrange = void (*)(const void* vector, const Norm& norm, float offset, float* arranged);
  // Writes sums over rows in the order of the features.
  using Restore = void (*)(const float* arranged, const Norm& norm, void* sums);
  Forward forward;
  Backward backward;
  Arrange arrange;
  Restore restore;
};
struct NormTable {
  // Writes the sum of `rows` rows, `stride` elements apart, to `out`, for columns [begin, end). `out` may be
  // the first row.
  using Columns = void (*)(const float* parts, int64_t rows, int64_t stride, int64_t begin, int64_t end,
                           float* out);
  NormRows of_float, of_bf16, of_fp16;
  Columns sum_rows;
};

// CUDA kernels. Pointers are on the device; stream is a cudaStream_t. Functions return the text of an error,
// or null.
struct NormCuda {
  using Forward = const char* (*)(const Norm& norm, const NormForward& io, int64_t rows, void* stream);
  // grad_weight and grad_bias are (parts, features). Each group of threads writes one row of them; parts <=
  // rows.
  using Backward = const char* (*)(const Norm& norm, const NormBackward& io, int64_t rows, int64_t parts,
                                   void* stream);
  // Writes the sum of `rows` rows of `features` elements to `out`, in fp32 or 16 bits.
  using SumRows = const char* (*)(const float* parts, int64_t rows, int64_t features, void* out,
                                  void* stream);
  Forward forward_float, forward_bf16, forward_fp16;
  Backward backward_float, backward_bf16, backward_fp16;
  SumRows sum_rows_float, sum_rows_bf16, sum_rows_fp16;
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::NormTable, norm)
