#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

/// CPU kernels that compute c (m, n) = beta c + alpha a b^T for few columns n. The rows of a (m, k) start
/// stride_a elements apart, and those of c stride_c elements apart. b (n, k) is contiguous. c is not read if
/// beta is 0.
struct SkinnyGemmTable {
  void (*multiply_float)(const float* a, int64_t stride_a, int64_t m, const float* b, int64_t n, int64_t k,
                         float* c, int64_t stride_c, float alpha, float beta);
  void (*multiply_bf16)(const uint16_t* a, int64_t stride_a, int64_t m, const float* b, int64_t n, int64_t k,
                        float* c, int64_t stride_c, float alpha, float beta);
  void (*multiply_fp16)(const uint16_t* a, int64_t stride_a, int64_t m, const float* b, int64_t n, int64_t k,
                        float* c, int64_t stride_c, float alpha, float beta);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::SkinnyGemmTable, skinny_gemm)
