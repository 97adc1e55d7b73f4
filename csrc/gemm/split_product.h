#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

namespace shoestring::gemm {

/// Splits the fp32 matrix scale * x into bf16 matrices whose sum is scale * x: the first holds the rounded
/// numbers, and each further one holds the rounded rest. Three of them represent fp32 numbers exactly, except
/// for numbers near the ends of the range.
///
/// parts: for each block of the result, the number of the matrix that it holds. The blocks are concatenated
/// along `dim`.
/// Returns nullopt if x or a product with `scale` is not finite.
std::optional<at::Tensor> split(const at::Tensor& x, double scale, c10::IntArrayRef parts, int dim);

/// Returns alpha * a b in fp32 on a CPU with bf16 instructions, where one operand is bf16 and the other fp32.
/// The fp32 operand is split into three bf16 matrices, so the products are as exact as fp32 products.
at::Tensor multiply_split(const at::Tensor& a, const at::Tensor& b, double alpha = 1);

}  // namespace shoestring::gemm
