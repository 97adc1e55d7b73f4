#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace shoestring::kernels {
struct GemmProduct;
}

namespace shoestring::gemm {

/// A matrix whose elements are computed while a product packs them, such as a quantised weight. No more than
/// a small block of it exists in memory at a time.
class ComputedMatrix {
 public:
  virtual ~ComputedMatrix() = default;

  virtual int64_t rows() const = 0;
  virtual int64_t columns() const = 0;

  /// Write the block of `rows` x `columns` elements that starts at (row, column) to the contiguous `out`, in
  /// fp32 or in bf16. Products call these functions from several threads at once.
  virtual void read(int64_t row, int64_t rows, int64_t column, int64_t columns, float* out) const = 0;
  virtual void read(int64_t row, int64_t rows, int64_t column, int64_t columns, uint16_t* out) const = 0;
};

/// The part of a computed matrix, which must outlive it, of `rows` x `columns` elements from (row, column)
/// on.
class ComputedPart final : public ComputedMatrix {
 public:
  ComputedPart(const ComputedMatrix& whole, int64_t row, int64_t rows, int64_t column, int64_t columns)
      : whole_(whole), row_(row), rows_(rows), column_(column), columns_(columns) {}

  int64_t rows() const override { return rows_; }
  int64_t columns() const override { return columns_; }
  void read(int64_t row, int64_t rows, int64_t column, int64_t columns, float* out) const override {
    whole_.read(row_ + row, rows, column_ + column, columns, out);
  }
  void read(int64_t row, int64_t rows, int64_t column, int64_t columns, uint16_t* out) const override {
    whole_.read(row_ + row, rows, column_ + column, columns, out);
  }

 private:
  const ComputedMatrix& whole_;
  int64_t row_, rows_, column_, columns_;
};

/// An operand of a product: a tensor (fp32, bf16 or fp16, any strides), a computed matrix, or gathered rows
/// of a tensor, which are copied while they are packed.
struct Factor {
  Factor(const at::Tensor& matrix) : matrix(matrix) {}  // NOLINT(google-explicit-constructor)
  Factor(const ComputedMatrix& computed, bool transposed) : computed(&computed), transposed(transposed) {}
  Factor(std::shared_ptr<const ComputedMatrix> owned, bool transposed)
      : computed(owned.get()), owned(std::move(owned)), transposed(transposed) {}
  /// The rows `index` of a matrix with contiguous rows. The numbers must outlive the product.
  Factor(const at::Tensor& matrix, c10::ArrayRef<int64_t> index, bool transposed)
      : matrix(matrix), index(index), gathered(true), transposed(transposed) {}

  int64_t size(int dim) const {
    const bool by_row = (dim == 0) != transposed;
    if (gathered) return by_row ? static_cast<int64_t>(index.size()) : matrix.size(1);
    if (computed != nullptr) return by_row ? computed->rows() : computed->columns();
    return matrix.size(dim);
  }

  at::Tensor matrix;
  const ComputedMatrix* computed = nullptr;
  std::shared_ptr<const ComputedMatrix> owned;  // null if `computed` belongs to somebody else
  c10::ArrayRef<int64_t> index;
  bool gathered = false;
  bool transposed = false;  // whether the operand is the transpose of `computed`, or of the gathered rows
};

/// The product of a (m, k) and b (k, n), one term of a sum of products.
struct Term {
  Factor a, b;
};

/// Returns whether gemm_sum() supports products in the dtype `compute` on this CPU, and is faster there than
/// the BLAS library.
bool sums_products(at::ScalarType compute);

/// Computes out (m, n) = gain * (sum of a b over all terms) + offset on the CPU. The operands are rounded to
/// `compute`, fp32 or bf16. The sums are fp32, and `out` is written and rounded once. At least one term has a
/// depth above zero. The result does not depend on the number of threads.
///
/// out: fp32, bf16 or fp16 with any strides. gain, offset: (n), contiguous fp32 tensors, or undefined.
/// then: the right operand of the product that this thread probably computes next, or null. Its memory is
/// brought into the cache.
void gemm_sum(at::ScalarType compute, const at::Tensor& out, c10::ArrayRef<Term> terms,
              const at::Tensor& gain = {}, const at::Tensor& offset = {}, const Factor* then = nullptr);

/// Computes out = gain * (beta * out + alpha * sum of a b over all terms) + offset like gemm_sum(), with the
/// functions of `product`.
void multiply_packed(const kernels::GemmProduct& product, const at::Tensor& out, c10::ArrayRef<Term> terms,
                     double beta, double alpha, const at::Tensor& gain = {}, const at::Tensor& offset = {},
                     const Factor* then = nullptr);

}  // namespace shoestring::gemm
