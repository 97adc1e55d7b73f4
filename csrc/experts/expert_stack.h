#pragma once

// The weights of experts as operands of products on the CPU.

#include <functional>
#include <optional>

#include <ATen/core/Tensor.h>

#include "gemm/grouped_product.h"
#include "quantization/base_weight.h"

namespace shoestring::experts {

/// A stack of weights (experts, out_features, in_features), or (experts, in_features, out_features) if it is
/// transposed. Its functions return the operands of groups, which refer to this object.
class ExpertStack {
 public:
  using Operand = std::function<gemm::Factor(int64_t group, int64_t first, int64_t last)>;

  ExpertStack() = default;
  /// A dense stack, for products of `compute`.
  ExpertStack(const at::Tensor& weight, bool transposed, at::ScalarType compute);
  /// A quantised stack of matrices (rows, columns), which products decode block by block.
  ExpertStack(quantization::PackedReader codes, int64_t experts, int64_t rows, int64_t columns,
              bool transposed);

  /// Returns the operand of rows with in_features, and that of rows with out_features, whose product is the
  /// gradient of the former.
  Operand forward() const { return operand(/*out=*/true); }
  Operand backward() const { return operand(/*out=*/false); }

 private:
  // out: whether the columns of the operand are the out_features.
  Operand operand(bool out) const;

  at::Tensor dense_;  // (experts, rows, columns)
  std::optional<quantization::QuantizedMatrix> codes_;
  int64_t rows_ = 0, columns_ = 0;
  bool transposed_ = false;
};

/// The low-rank update of a stack: the weight of an expert is W + scaling * B A, with a (experts, rank,
/// in_features) and b (experts, out_features, rank). Without `a`, there is none, and results are undefined.
class ExpertUpdate {
 public:
  ExpertUpdate(const std::optional<at::Tensor>& a, const std::optional<at::Tensor>& b, double scaling,
               at::ScalarType compute);

  bool defined() const { return rank_ > 0; }

  /// Returns scaling * in A^T (slots, rank), in the dtype of sums, and the term of its product with B^T.
  at::Tensor low(const gemm::Slots& in, c10::ArrayRef<int64_t> offsets) const;
  gemm::SlotTerm forward(const at::Tensor& low) const { return {low, b_.forward()}; }

  /// Returns scaling * grad B (slots, rank), in the dtype of sums, and the term of its product with A.
  at::Tensor grad_low(const gemm::Slots& grad, c10::ArrayRef<int64_t> offsets) const;
  gemm::SlotTerm backward(const at::Tensor& grad_low) const { return {grad_low, a_.backward()}; }

 private:
  at::Tensor times(const gemm::Slots& rows, c10::ArrayRef<int64_t> offsets,
                   const ExpertStack::Operand& operand) const;

  int64_t rank_;  // 0 for none
  double scaling_;
  at::ScalarType compute_;
  ExpertStack a_, b_;
};

}  // namespace shoestring::experts
