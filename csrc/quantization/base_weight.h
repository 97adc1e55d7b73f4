#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "gemm/products.h"
#include "quantization/packed.h"

namespace shoestring::quantization {

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
                        at::ScalarType dtype, const gemm::Products& products);

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
                        const gemm::Products& products);

}  // namespace shoestring::quantization
