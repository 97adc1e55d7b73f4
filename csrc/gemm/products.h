#pragma once

#include "core/tensors.h"

namespace shoestring::gemm {

/// Returns whether this CPU has instructions for products of bf16 matrices and PyTorch's oneDNN backend is
/// enabled.
bool multiplies_bf16();

/// Returns whether products of bf16 matrices run on AMX tiles. It implies multiplies_bf16().
bool multiplies_by_tiles();

/// Returns the dtype of the operands of a CPU product of x and a weight: bf16 if x is bf16 and the CPU has
/// bf16 instructions, else fp32 (fp64 for fp64). Without bf16 instructions, PyTorch's 16-bit products are ten
/// to hundreds of times slower than fp32 products.
at::ScalarType product_type(const at::Tensor& x);

/// The operand dtypes of the matrix products in an operator on x. On CUDA, all operands have x's dtype,
/// because tensor cores take 16-bit operands and accumulate in fp32. On the CPU, operands of products with
/// the weight have the dtype product_type(x), and other operands have compute_type(x).
struct Products {
  Products(Backend backend, const at::Tensor& x);

  Backend backend;
  at::ScalarType weight;  // dtype of both operands of a product with the weight
  at::ScalarType other;   // dtype of both operands of other products
};

/// Returns alpha * a b in `dtype`, rounded once. The operands a and b have the dtype products.other, or a
/// narrower one that gemm() widens to it. The product of a bf16 and an fp32 operand is as exact as an fp32
/// product.
at::Tensor multiply(const Products& products, const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype,
                    double alpha = 1);

/// Computes out = beta * out + alpha * a b or, if `bias` is defined, out = bias + alpha * a b. `out` may have
/// any strides.
void multiply_into(const at::Tensor& out, const Products& products, const at::Tensor& bias,
                   const at::Tensor& a, const at::Tensor& b, double beta, double alpha = 1);

}  // namespace shoestring::gemm
