#pragma once

#include <ATen/core/Tensor.h>

#include "gemm/packed_gemm.h"

namespace shoestring::quantization {

/// A matrix (fp32, bf16 or fp16, on the CPU) whose columns are multiplied by gains while a product packs it.
/// The scaled matrix is never stored.
class ScaledMatrix final : public gemm::ComputedMatrix {
 public:
  /// gain: (columns), fp32.
  ScaledMatrix(const at::Tensor& matrix, const at::Tensor& gain);

  int64_t rows() const override { return matrix_.size(0); }
  int64_t columns() const override { return matrix_.size(1); }
  void read(int64_t row, int64_t rows, int64_t column, int64_t columns, float* out) const override;
  void read(int64_t row, int64_t rows, int64_t column, int64_t columns, uint16_t* out) const override;

 private:
  template <class OfFloat, class OfBits, class To>
  void read_block(int64_t row, int64_t rows, int64_t column, int64_t columns, OfFloat of_float,
                  OfBits of_bf16, OfBits of_fp16, To* out) const;

  at::Tensor matrix_, gain_;
};

}  // namespace shoestring::quantization
