#include "gemm/gemm.h"

#include <ATen/Functions.h>

namespace shoestring::gemm {

using at::Tensor;

void gemm(const Tensor& out, const Tensor& a, const Tensor& b, double beta, double alpha) {
  Tensor result = out;
  if (!out.is_cuda()) {
    gemm_cpu(out, a, b, beta, alpha);
  } else if (out.scalar_type() == a.scalar_type()) {
    // `out` is passed to addmm_out both as the result and as its argument self, which avoids a copy. PyTorch
    // does not read self if beta is 0.
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
