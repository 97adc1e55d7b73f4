#pragma once

#include "core/tensors.h"

namespace shoestring::gemm {

/// True where this CPU has units for bf16 products, and may use them.
bool multiplies_bf16();

/// On the CPU, the type of the operands of products with the weight: bf16 as it is where the CPU has units
/// for it, and elsewhere the compute type, since PyTorch's 16-bit products are then slower than fp32 by a
/// factor of ten to hundreds.
at::ScalarType product_type(const at::Tensor& x);

/// The types that an operator on x multiplies in. On CUDA all are x's: tensor cores take 16-bit operands and
/// add in fp32. On the CPU product_type for products with the weight, and compute_type for the others.
struct Products {
  Products(Backend backend, const at::Tensor& x);

  Backend backend;
  at::ScalarType weight;  // of products of x, or a gradient, with the weight
  at::ScalarType other;   // of all other products
};

/// alpha * a b in `dtype`, rounded once. a and b are of one type, products.other.
at::Tensor multiply(const Products& products, const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype,
                    double alpha = 1);

/// out = beta * out + alpha * a b, or bias + alpha * a b if there is a bias. `out` may have any strides.
void multiply_into(const at::Tensor& out, const Products& products, const at::Tensor& bias,
                   const at::Tensor& a, const at::Tensor& b, double beta, double alpha = 1);

}  // namespace shoestring::gemm
