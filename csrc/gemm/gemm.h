#pragma once

#include <ATen/core/Tensor.h>

namespace shoestring::gemm {

/// Returns the number of pieces of length `size` that cover `total`. The last piece may be shorter.
constexpr int64_t parts_of(int64_t total, int64_t size) { return (total + size - 1) / size; }

/// Computes out (m, n) = beta * out + alpha * a (m, k) b (k, n), accumulated in fp32 (fp64 for fp64).
///
/// a and b are fp32, fp64, bf16 or fp16; on CUDA they have the same dtype. out has that dtype or, for 16-bit
/// operands, fp32. Each matrix may be a transposed or row-strided view; no copy of it is made. On CUDA,
/// cuBLAS computes the product, and fp32 follows torch.backends.cuda.matmul. On the CPU, 16-bit operands are
/// widened to fp32 while they are packed for the cache. Two bf16 operands use the CPU's bf16 instructions
/// instead, if it has them. The sums do not depend on the number of threads.
void gemm(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, double beta = 0, double alpha = 1);
/// Upper bound (approximate) on the memory of packed panels in a CPU product: 8 MiB shared by all threads and
/// 256 KiB per thread.
constexpr int64_t kGemmWorkspace = int64_t{9} << 20;

/// Returns true if gemm() on this CPU reads 16-bit operands directly for a product in `type`. Otherwise it
/// converts them to `type` first.
bool gemm_widens(at::ScalarType type);
void gemm_cpu(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, double beta, double alpha);

/// Computes gemm() on the CPU, but may round a product of bf16 matrices to bf16 before writing or adding it,
/// as PyTorch does. For a few rows the library's product is then several times faster. With AMX, terms that
/// are added to an fp32 `out` are never rounded.
void gemm_rounded(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, double beta = 0,
                  double alpha = 1);

/// Computes out = bias (n) + alpha * a b; all tensors have the same dtype. cuBLAS adds the bias while it
/// writes the result.
void gemm_bias(const at::Tensor& out, const at::Tensor& bias, const at::Tensor& a, const at::Tensor& b,
               double alpha = 1);

}  // namespace shoestring::gemm
