#pragma once

#include "core/tensors.h"

namespace shoestring::gemm {

/// Returns true if this CPU has bf16 product instructions and PyTorch's oneDNN backend is enabled.
bool multiplies_bf16();

/// Returns the dtype of the operands of CPU products with the weight: bf16 if x is bf16 and the CPU has bf16
/// instructions, otherwise the compute type. Without these instructions PyTorch's 16-bit products are ten to
/// hundreds of times slower than fp32.
at::ScalarType product_type(const at::Tensor& x);

/// The dtypes of the matrix products of an operator on x. On CUDA both are x's dtype: tensor cores take
/// 16-bit operands and accumulate in fp32. On the CPU they are product_type() for products with the weight,
/// and compute_type() for all other products.
struct Products {
  Products(Backend backend, const at::Tensor& x);

  Backend backend;
  at::ScalarType weight;  // operands of the products of x, or of a gradient, with the weight
  at::ScalarType other;   // operands of all other products
};

/// Returns alpha * a b in `dtype`, rounded once. a and b have the dtype products.other.
at::Tensor multiply(const Products& products, const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype,
                    double alpha = 1);

/// Computes out = beta * out + alpha * a b, or bias + alpha * a b if `bias` is defined. `out` may have any
/// strides.
void multiply_into(const at::Tensor& out, const Products& products, const at::Tensor& bias,
                   const at::Tensor& a, const at::Tensor& b, double beta, double alpha = 1);

}  // namespace shoestring::gemm
