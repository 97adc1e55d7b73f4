#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

// Values that rms_norm rounds to x's 16-bit dtype before it multiplies the normalised row by the weight.
// kLlama: the normalised row. kGemma: none. kNone: the reciprocal root, the normalised row and the weight.
enum class Upcast : int { kLlama, kGemma, kNone };

// Arguments of rms_norm or, if `centred`, of layer_norm, over contiguous rows.
struct Norm {
  int64_t features;
  float eps;
  bool centred = false;
  Upcast upcast = Upcast::kGemma;
  float offset = 0;  // number added to the weight before the weight multiplies the normalised row
  // whether weight, bias and their gradients are fp32; otherwise they have x's dtype
  bool wide_weight = true;
};

// Tensors of the norm kernels, as pointers to their first row. The pointer of a tensor that is not given is
// null.
struct NormForward {
  const void *x, *residual;  // if a residual is given, x + residual is rounded and then normalised
  const void *weight, *bias;
  void *sum, *y;       // sum receives x + residual, y the normalised result
  float *mean, *rstd;  // mean and rstd of each row; mean is null for rms_norm
};
struct NormBackward {
  const void *grad, *grad_sum;  // grad_sum is the gradient of `sum`, which is added to grad_x
  const void *x, *weight;
  const float *mean, *rstd;
  void* grad_x;
  void* rounded_grad_x;            // receives grad_x in the 16-bit dtype of `grad` as well; may be null
  float *grad_weight, *grad_bias;  // sums over rows that give the gradients of weight and bias
};

// CPU kernels of rms_norm and layer_norm for rows of one dtype. Weight, bias and sums over rows are fp32, in
// the element order that `arrange` writes. The weight is always given, the bias only for layer_norm.
// grad_weight and grad_bias are null if neither gradient is wanted; grad_bias is also null for rms_norm.
struct NormRows {
  // Normalises the rows [begin, end).
  using Forward = void (*)(const Norm& norm, const NormForward& io, int64_t begin, int64_t end);
  // Computes grad_x for the rows [begin, end). Adds their contributions to the gradients of weight and bias
  // to grad_weight and grad_bias (features).
  using Backward = void (*)(const Norm& norm, const NormBackward& io, int64_t begin, int64_t end);
  // Converts a weight or bias (features) in fp32 or x's dtype, plus `offset`, to fp32 in the element order of
  // the kernels. If `upcast` is kNone, also rounds the result to x's dtype.
  using Arrange = void (*)(const void* vector, const Norm& norm, float offset, float* arranged);
  // Converts sums over rows from the element order of the kernels to the order of the features, and from fp32
  // to the dtype of the weight.
  using Restore = void (*)(const float* arranged, const Norm& norm, void* sums);
  Forward forward;
  Backward backward;
  Arrange arrange;
  Restore restore;
};
struct NormTable {
  // Adds `rows` rows, which start `stride` elements apart, for the columns [begin, end), and writes the sums
  // to `out`. `out` may be the first row.
  using Columns = void (*)(const float* parts, int64_t rows, int64_t stride, int64_t begin, int64_t end,
                           float* out);
  NormRows of_float, of_bf16, of_fp16;
  // Rows that are normalised in fp32 while y and its gradient are bf16 or fp16. A residual is
  // fp32. x is fp32 (`float_to_`), or has the dtype of y and is added to a residual (`_plus_float`).
  NormRows float_to_bf16, float_to_fp16, bf16_plus_float, fp16_plus_float;
  // Forward of rows that are normalised in fp32, as y is, while x is bf16 or fp16 and the residual fp32.
  NormRows bf16_widened, fp16_widened;
  Columns sum_rows;
};

// CUDA kernels of rms_norm and layer_norm. Pointers are on the device; `stream` is a cudaStream_t. Each
// function returns an error message, or null.
struct NormCuda {
  using Forward = const char* (*)(const Norm& norm, const NormForward& io, int64_t rows, void* stream);
  // grad_weight and grad_bias are (parts, features). Each group of threads writes its sums over rows to one
  // of the parts; parts <= rows.
  using Backward = const char* (*)(const Norm& norm, const NormBackward& io, int64_t rows, int64_t parts,
                                   void* stream);
  // Writes the sums over `rows` rows of `features` elements to `out`, in fp32, bf16 or fp16.
  using SumRows = const char* (*)(const float* parts, int64_t rows, int64_t features, void* out,
                                  void* stream);
  Forward forward_float, forward_bf16, forward_fp16;
  Backward backward_float, backward_bf16, backward_fp16;
  SumRows sum_rows_float, sum_rows_bf16, sum_rows_fp16;
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::NormTable, norm)
