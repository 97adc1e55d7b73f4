#include "gemm/gemm.h"

#include <ATen/Functions.h>

#include "core/device.h"

namespace shoestring::gemm {

using at::Tensor;

void gemm(const Tensor& out, const Tensor& a, const Tensor& b, double beta, double alpha) {
  Tensor result = out;
  if (out.is_cpu()) {
    gemm_cpu(out, a, b, beta, alpha);
  } else if (out.scalar_type() == a.scalar_type()) {
    // `out` is passed to addmm_out both as the result and as its argument self, which avoids a copy. PyTorch
    // does not read self if beta is 0.
    at::addmm_out(result, result, a, b, beta, alpha);
  } else if (is_cuda(out)) {
    at::addmm_out(result, result, a, b, out.scalar_type(), beta, alpha);
  } else {
    // Only CUDA has products with a wider result. The product of two 16-bit numbers is exact in fp32.
    at::addmm_out(result, result, a.to(out.scalar_type()), b.to(out.scalar_type()), beta, alpha);
  }
}

void gemm_bias(const Tensor& out, const Tensor& bias, const Tensor& a, const Tensor& b, double alpha) {
  Tensor result = out;
  if (out.is_cpu()) {
    result.copy_(bias);
    gemm_rounded(out, a, b, 1, alpha);
  } else {
    at::addmm_out(result, bias, a, b, 1, alpha);
  }
}

}  // namespace shoestring::gemm
