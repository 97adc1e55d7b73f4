#include "experts/expert_stack.h"

#include <memory>
#include <utility>

#include <ATen/Functions.h>

#include "experts/slots.h"

namespace shoestring::experts {

using at::Tensor;

ExpertStack::ExpertStack(const Tensor& weight, bool transposed, at::ScalarType compute)
    : dense_(readable(weight, compute)), rows_(weight.size(1)), columns_(weight.size(2)),
      transposed_(transposed) {}

ExpertStack::ExpertStack(quantization::PackedReader codes, int64_t experts, int64_t rows, int64_t columns,
                         bool transposed)
    : rows_(rows), columns_(columns), transposed_(transposed) {
  codes_.emplace(std::move(codes), experts * rows, columns);
}

ExpertStack::Operand ExpertStack::operand(bool out) const {
  const bool by_row = out != transposed_;  // whether the columns of the operand are rows of the weight
  return [this, by_row](int64_t e, int64_t first, int64_t last) -> gemm::Factor {
    const int64_t row = by_row ? first : 0, column = by_row ? 0 : first;
    const int64_t rows = by_row ? last - first : rows_, columns = by_row ? columns_ : last - first;
    if (codes_.has_value()) {
      return {std::make_shared<gemm::ComputedPart>(*codes_, e * rows_ + row, rows, column, columns), by_row};
    }
    const Tensor part = dense_[e].narrow(0, row, rows).narrow(1, column, columns);
    return by_row ? part.t() : part;
  };
}

ExpertUpdate::ExpertUpdate(const std::optional<Tensor>& a, const std::optional<Tensor>& b, double scaling,
                           at::ScalarType compute)
    : rank_(a.has_value() ? a->size(1) : 0), scaling_(scaling), compute_(compute) {
  if (rank_ == 0) return;
  a_ = ExpertStack(*a, /*transposed=*/false, compute);
  b_ = ExpertStack(*b, /*transposed=*/false, compute);
}

Tensor ExpertUpdate::low(const gemm::Slots& in, c10::ArrayRef<int64_t> offsets) const {
  return times(in, offsets, a_.forward());
}

Tensor ExpertUpdate::grad_low(const gemm::Slots& grad, c10::ArrayRef<int64_t> offsets) const {
  return times(grad, offsets, b_.backward());
}

Tensor ExpertUpdate::times(const gemm::Slots& rows, c10::ArrayRef<int64_t> offsets,
                           const ExpertStack::Operand& operand) const {
  if (rank_ == 0) return {};
  const int64_t slots = rows.refers ? static_cast<int64_t>(rows.rows.size()) : rows.matrix.size(0);
  Tensor product = at::empty({slots, rank_}, rows.matrix.options().dtype(compute_type(rows.matrix)));
  gemm::multiply_slots(compute_, product, rows, offsets, operand);
  return scaling_ == 1 ? product : product.mul_(scaling_);
}

}  // namespace shoestring::experts
