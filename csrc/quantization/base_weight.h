#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "quantization/packed.h"

namespace shoestring {

/// The type that products with `x` are computed in: fp32, or fp64 for fp64.
inline at::ScalarType compute_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

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

/// x (..., features) as (tokens, features).
inline at::Tensor as_matrix(const at::Tensor& x) {
  int64_t tokens = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) tokens *= x.size(i);
  return x.reshape({tokens, x.size(-1)});
}

/// x's shape with `features` in place of its last size.
inline std::vector<c10::SymInt> with_last(const at::Tensor& x, const c10::SymInt& features) {
  auto shape = x.sym_sizes().vec();
  shape.back() = features;
  return shape;
}

/// A frozen (rows, columns) weight, dense or quantised, read a panel of rows at a time in the type of the
/// product: as it lies where it is dense in that type, or in one that gemm widens to it, else through one
/// buffer: of about the cache's size, on CUDA of up to 64 MiB.
class BaseWeight {
 public:
  static BaseWeight dense(const at::Tensor& weight, at::ScalarType product);
  static BaseWeight quantized(PackedReader reader, int64_t rows, int64_t columns, at::TensorOptions product);

  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  bool one_panel() const { return rows_ <= step_; }
  /// The packed weight, where it multiplies so few tokens itself; else null.
  const PackedReader* for_few(int64_t tokens) const {
    return reader_.has_value() && reader_->multiplies(tokens, columns_) ? &*reader_ : nullptr;
  }
  /// Calls body(begin, panel) for panels (size, columns) that together are the weight, in order.
  template <class Body>
  void for_each_panel(Body body) const {
    for (int64_t begin = 0; begin < rows_; begin += step_) {
      body(begin, panel(begin, std::min(step_, rows_ - begin)));
    }
  }

 private:
  at::Tensor panel(int64_t begin, int64_t size) const;

  int64_t rows_ = 0, columns_ = 0, step_ = 0;
  at::Tensor dense_, buffer_, narrow_;
  std::optional<PackedReader> reader_;
};

/// What an adapter adds to its layer's output; every part may be undefined.
struct Adaptation {
  at::Tensor low,
      up;  // together: scaling * low (tokens, rank) up (rows, rank)^T is added to the product with the weight
  double scaling = 1;
  at::Tensor gain;  // (rows), fp32 or fp64: multiplies that sum
  at::Tensor bias;  // (rows), is added then
};

/// out (tokens, rows) of `dtype` = gain * (x (tokens, columns) weight^T + scaling * low up^T) + bias. x is of
/// type products.weight, or of one that gemm widens to it, the others of products.other.
at::Tensor apply_weight(const BaseWeight& weight, const at::Tensor& x, const Adaptation& adaptation,
                        at::ScalarType dtype, const Products& products);

/// The sum over the weights of (gain * grad) (tokens, rows) weight, and of low (tokens, rank) down, of a type
/// that holds it: (tokens, columns). Each grad, of any dtype, is converted to products.weight a panel's
/// columns at a time; low and down are of type products.other, and undefined together.
struct GradAndWeight {
  at::Tensor grad;
  at::Tensor gain;  // (rows), fp32 or fp64; may be undefined
  BaseWeight weight;
};
at::Tensor times_weight(const std::vector<GradAndWeight>& terms, int64_t tokens, int64_t columns,
                        at::TensorOptions like, const at::Tensor& low, const at::Tensor& down,
                        const Products& products);

}  // namespace shoestring
