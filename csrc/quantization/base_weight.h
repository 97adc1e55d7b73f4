#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "core/row_source.h"
#include "gemm/packed_gemm.h"
#include "gemm/products.h"
#include "quantization/packed.h"

namespace shoestring::quantization {

/// A quantised weight (rows, columns), of which a product on the CPU dequantises small blocks while it packs
/// them.
class QuantizedMatrix final : public gemm::ComputedMatrix {
 public:
  QuantizedMatrix(PackedReader reader, int64_t rows, int64_t columns)
      : reader_(std::move(reader)), rows_(rows), columns_(columns) {}

  const PackedReader& reader() const { return reader_; }
  int64_t rows() const override { return rows_; }
  int64_t columns() const override { return columns_; }
  void read(int64_t row, int64_t rows, int64_t column, int64_t columns, float* out) const override {
    read_rows(row, rows, column, columns, out);
  }
  void read(int64_t row, int64_t rows, int64_t column, int64_t columns, uint16_t* out) const override {
    read_rows(row, rows, column, columns, out);
  }

 private:
  template <class T>
  void read_rows(int64_t row, int64_t rows, int64_t column, int64_t columns, T* out) const {
    for (int64_t i = 0; i < rows; ++i) {
      reader_.read((row + i) * columns_ + column, columns, out + i * columns);
    }
  }

  PackedReader reader_;
  int64_t rows_, columns_;
};

/// A frozen weight (rows, columns), dense or quantised. On the CPU it is an operand of gemm::gemm_sum().
/// Other products read it as row panels in the GEMM's dtype. Panels are views if the GEMM reads the weight
/// directly; otherwise they are converted into one reused buffer (about 4 MiB on the CPU, up to 64 MiB on
/// CUDA). If the weight is away from its device, its panels arrive from its RowSource.
class BaseWeight {
 public:
  /// If the weight is away, its elements are rounded to the dtype `rounded` first.
  static BaseWeight dense(const at::Tensor& weight, at::ScalarType product,
                          std::optional<at::ScalarType> rounded = std::nullopt);
  static BaseWeight quantized(PackedReader reader, int64_t rows, int64_t columns, at::TensorOptions product);

  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  bool one_panel() const { return rows_ <= step_; }
  /// Returns the quantised weight if PackedReader::multiply() is faster for this number of tokens than
  /// products with panels, otherwise null.
  const PackedReader* for_few(int64_t tokens) const {
    return quantized_.has_value() && quantized_->reader().multiplies(tokens, columns_) ? &quantized_->reader()
                                                                                       : nullptr;
  }
  /// Returns the weight or its transpose as an operand of gemm::gemm_sum(). The operand refers to this
  /// object.
  gemm::Factor factor(bool transposed) const {
    if (quantized_.has_value()) return {*quantized_, transposed};
    return transposed ? dense_.t() : dense_;
  }
  /// Calls body(begin, panel) for each panel (size, columns) of the weight, in order.
  template <class Body>
  void for_each_panel(Body body) const {
    const Buffers buffers = make_buffers();
    if (source_ != nullptr) {
      source_->for_each(dense_, step_, [&](int64_t begin, const at::Tensor& rows) {
        body(begin, converted(buffers, rows.to(panel_type_)));
      });
      return;
    }
    for (int64_t begin = 0; begin < rows_; begin += step_) {
      body(begin, panel(buffers, begin, std::min(step_, rows_ - begin)));
    }
  }

 private:
  struct Buffers {
    at::Tensor dequantized, converted;  // undefined if panels need none
  };
  Buffers make_buffers() const;
  at::Tensor panel(const Buffers& buffers, int64_t begin, int64_t size) const;
  at::Tensor converted(const Buffers& buffers, const at::Tensor& part) const;

  int64_t rows_ = 0, columns_ = 0, step_ = 0;
  at::Tensor dense_;
  std::shared_ptr<RowSource> source_;                      // null unless dense_ is away
  at::ScalarType panel_type_ = at::ScalarType::Undefined;  // dtype of a dense panel before it is converted
  at::TensorOptions product_;                              // dtype and device of a panel
  std::optional<QuantizedMatrix> quantized_;
};

/// The tensors that an adapter (LoRA or a relative) adds to a linear layer, and the layer's bias. Every
/// tensor may be undefined.
struct Adaptation {
  // The low-rank term scaling * low (tokens, rank) up (rows, rank)^T is added to the product of input and
  // weight.
  at::Tensor low, up;
  double scaling = 1;
  // gain (rows), fp32 or fp64: multiplies the sum of the product and the low-rank term
  at::Tensor gain;
  at::Tensor bias;  // bias (rows), added after the multiplication by `gain`
};

/// Computes out (tokens, rows) in `dtype` = gain * (x (tokens, columns) weight^T + scaling * low up^T) +
/// bias. `products` gives the dtypes of the products: x has the dtype products.weight, or one that gemm()
/// widens to it. low, up and bias have the dtype products.other.
at::Tensor apply_weight(const BaseWeight& weight, const at::Tensor& x, const Adaptation& adaptation,
                        at::ScalarType dtype, const gemm::Products& products);

/// One term of the sum that times_weight() computes: the product (gain * grad) weight.
struct GradAndWeight {
  at::Tensor grad;
  at::Tensor gain;  // gain (rows), fp32 or fp64; undefined for a gain of 1
  BaseWeight weight;
};

/// Returns the gradient of the input of one or several layers: the sum of (gain * grad) (tokens, rows) weight
/// over all terms, plus low (tokens, rank) down. The result has the shape (tokens, columns) and the dtype
/// `dtype`, to which the sum is rounded once. Each grad may have any dtype; it is converted to
/// products.weight. low and down have the dtype products.other, or both are undefined.
at::Tensor times_weight(const std::vector<GradAndWeight>& terms, int64_t tokens, int64_t columns,
                        at::TensorOptions like, at::ScalarType dtype, const at::Tensor& low,
                        const at::Tensor& down, const gemm::Products& products);

}  // namespace shoestring::quantization
