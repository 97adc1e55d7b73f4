#include "gemm/gemm.h"

#include <ATen/Functions.h>

namespace shoestring::gemm {

using at::Tensor;

void gemm(const Tensor& out, const Tensor& a, const Tensor& b, double beta, double alpha) {
  Tensor result = out;
  if (!out.is_cuda()) {
    gemm_cpu(out, a, b, beta, alpha);
  } else if (out.scalar_type() == a.scalar_type()) {
    // Passing one tensor as self and as out avoids a copy, and with beta = 0 PyTorch does not read it.
    at::addmm_out(result, result, a, b, beta, alpha);
  } else {
    at::addmm_out(result, result, a, b, out.scalar_type(), beta, alpha);
  }
}

void gemm_bias(const Tensor& out, const Tensor& bias, const Tensor& a, const Tensor& b, double alpha) {
  Tensor result = out;
  if (!out.is_cuda()) {
    result.copy_(bias);
    gemm_rounded(out, a, b, 1, alpha);
  } else {
    at::addmm_out(result, bias, a, b, 1, alpha);
  }
}

}  // namespace shoestring::gemm
