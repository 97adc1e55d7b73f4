#pragma once

#include <ATen/core/Tensor.h>

namespace shoestring {

/// out (m, n) = beta * out + alpha * a (m, k) b (k, n), accumulated in fp32 (fp64 for fp64). The one place where the
/// CUDA side of an operator multiplies matrices.
///
/// a and b: one dtype, fp32, fp64, bf16 or fp16; out: that dtype or, for 16 bits, fp32. Each may be a transposed or
/// row-strided view, which is read and written as it lies. fp32 products follow torch.backends.cuda.matmul. With CPU
/// tensors, which the tests of CUDA host code use, 16-bit operands are widened to fp32.
void gemm(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, double beta = 0, double alpha = 1);

/// out = bias (n) + alpha * a b, all of one dtype: cuBLAS adds the bias as it writes.
void gemm_bias(const at::Tensor& out, const at::Tensor& bias, const at::Tensor& a, const at::Tensor& b,
               double alpha = 1);

}  // namespace shoestring
