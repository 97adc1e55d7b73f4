#pragma once

#include <ATen/core/Tensor.h>

namespace shoestring::gemm {

/// Returns the number of parts into which `total` elements are divided, where each part has `size` elements.
/// The last part may be shorter.
constexpr int64_t parts_of(int64_t total, int64_t size) { return (total + size - 1) / size; }

/// Computes out (m, n) = beta * out + alpha * a (m, k) b (k, n), accumulated in fp32 (fp64 for fp64).
///
/// a and b are fp32, fp64, bf16 or fp16; on CUDA, they have equal dtypes. out has the dtype of the operands
/// or, for 16-bit operands, may be fp32. A matrix that is a transposed or row-strided view is not copied. On
/// CUDA, cuBLAS computes the product, and fp32 follows torch.backends.cuda.matmul. On the CPU, 16-bit
/// operands are converted to fp32 while they are packed for the cache. For two bf16 operands, AMX or the
/// CPU's bf16 instructions are used instead if it has them. The result does not depend on the number of
/// threads.
void gemm(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, double beta = 0, double alpha = 1);

/// Returns an upper bound in bytes for the packed panels and the sums of a CPU matrix product whose operands
/// have the dtype `type`: about 8 MiB shared by all threads, and 1 MiB for each thread, or 3.5 MiB for bf16
/// on a CPU with AMX.
int64_t gemm_workspace(at::ScalarType type);

/// Returns whether a product on this CPU with results of dtype `type` reads 16-bit operands directly.
/// Otherwise gemm() first converts the operands to `type`.
bool gemm_widens(at::ScalarType type);
void gemm_cpu(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, double beta, double alpha);

/// Computes out = beta * out + alpha * a b on the CPU like gemm(), except that fewer than 8 rows of bf16
/// matrices are multiplied by oneDNN, which may round the product to bf16 before writing or adding it.
void gemm_rounded(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, double beta = 0,
                  double alpha = 1);

/// Computes out (m, n) = beta * out + alpha * a (m, k) b (k, n) on the CPU, with operands in the dtype
/// `compute`.
///
/// a, b and out are fp32, bf16 or fp16, each with its own dtype and any strides. `compute` is fp32 or bf16.
/// For bf16, operands of other dtypes are rounded to bf16 while they are packed, so the caller need not
/// convert them. The sums are fp32. A 16-bit `out` is rounded once. The result does not depend on the number
/// of threads.
void gemm_in(at::ScalarType compute, const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
             double beta = 0, double alpha = 1);

/// Computes out = bias (n) + alpha * a b; all tensors have equal dtypes. On CUDA, cuBLAS adds the bias while
/// it writes the result.
void gemm_bias(const at::Tensor& out, const at::Tensor& bias, const at::Tensor& a, const at::Tensor& b,
               double alpha = 1);

}  // namespace shoestring::gemm
