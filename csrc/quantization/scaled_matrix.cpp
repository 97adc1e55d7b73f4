#include "quantization/scaled_matrix.h"

#include "core/tensors.h"
#include "gemm/products.h"
#include "quantization/scale_columns_table.h"

namespace shoestring::quantization {

using at::Tensor;

ScaledMatrix::ScaledMatrix(const Tensor& matrix, const Tensor& gain)
    : matrix_(matrix.stride(1) == 1 || matrix.size(1) == 1 ? matrix : matrix.contiguous()),
      gain_(gain.contiguous()) {}

template <class OfFloat, class OfBits, class To>
void ScaledMatrix::read_block(int64_t row, int64_t rows, int64_t column, int64_t columns, OfFloat of_float,
                              OfBits of_bf16, OfBits of_fp16, To* out) const {
  const int64_t stride = matrix_.stride(0), at = row * stride + column;
  const float* gain = gain_.const_data_ptr<float>() + column;
  if (matrix_.scalar_type() == at::kFloat) {
    of_float(matrix_.const_data_ptr<float>() + at, stride, gain, rows, columns, out);
  } else {
    (matrix_.scalar_type() == at::kHalf ? of_fp16 : of_bf16)(const_bits(matrix_) + at, stride, gain, rows,
                                                             columns, out);
  }
}

void ScaledMatrix::read(int64_t row, int64_t rows, int64_t column, int64_t columns, float* out) const {
  const auto& k = cpu::scale_columns();
  read_block(row, rows, column, columns, k.float_to_float, k.bf16_to_float, k.fp16_to_float, out);
}

void ScaledMatrix::read(int64_t row, int64_t rows, int64_t column, int64_t columns, uint16_t* out) const {
  const auto& k = cpu::scale_columns();
  if (gemm::multiplies_bf16()) {
    read_block(row, rows, column, columns, k.float_by_units, k.bf16_by_units, k.fp16_by_units, out);
  } else {
    read_block(row, rows, column, columns, k.float_to_bf16, k.bf16_to_bf16, k.fp16_to_bf16, out);
  }
}

}  // namespace shoestring::quantization
