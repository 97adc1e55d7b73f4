#pragma once

#include <ATen/core/Tensor.h>

namespace shoestring::gemm {

/// How many pieces of a size there are, the last one perhaps smaller.
constexpr int64_t parts_of(int64_t total, int64_t size) { return (total + size - 1) / size; }

/// out (m, n) = beta * out + alpha * a (m, k) b (k, n), accumulated in fp32 (fp64 for fp64).
///
/// a and b: fp32, fp64, bf16 or fp16, on CUDA of one dtype; out: that dtype or, for 16 bits, fp32. Each may
/// be a transposed or row-strided view, which is read and written as it lies. On CUDA cuBLAS multiplies, and
/// fp32 follows torch.backends.cuda.matmul. On the CPU 16-bit operands are widened on their way into cache,
/// or, two of bf16, multiplied by the CPU's units for them; sums do not depend on the number of threads.
void gemm(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, double beta = 0, double alpha = 1);
/// What a product on the CPU packs into, about, at most: 8 MiB for all threads and 256 KiB for each.
constexpr int64_t kGemmWorkspace = int64_t{9} << 20;

/// True where gemm on this CPU reads 16-bit operands of a product in `type` as they lie; else it copies them
/// first.
bool gemm_widens(at::ScalarType type);
void gemm_cpu(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, double beta, double alpha);

/// gemm on a CPU, where one product of bf16 matrices may be rounded to bf16 before it is written or added, as
/// PyTorch's own are: for a few rows the library's product is then several times faster. With AMX, terms that
/// are added to an fp32 `out` are never rounded.
void gemm_rounded(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, double beta = 0,
                  double alpha = 1);

/// out = bias (n) + alpha * a b, all of one dtype: cuBLAS adds the bias as it writes.
void gemm_bias(const at::Tensor& out, const at::Tensor& bias, const at::Tensor& a, const at::Tensor& b,
               double alpha = 1);

}  // namespace shoestring::gemm
