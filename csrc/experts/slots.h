#pragma once

// The slots of experts on the CPU: which rows of x each expert multiplies.

#include <initializer_list>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "core/huge_pages.h"
#include "core/row_source.h"
#include "core/tensors.h"
#include "gemm/grouped_product.h"

namespace shoestring::experts {

/// Views a contiguous int64 tensor as a list.
inline c10::ArrayRef<int64_t> numbers(const at::Tensor& t) {
  return {t.const_data_ptr<int64_t>(), static_cast<size_t>(t.numel())};
}

/// Starts to bring the weights of experts that have slots, if they are away. They stay while this object
/// lives.
class BroughtExperts {
 public:
  BroughtExperts(c10::ArrayRef<int64_t> offsets, std::initializer_list<std::optional<at::Tensor>> stacks) {
    for (const auto& stack : stacks) {
      if (!stack.has_value()) continue;
      if (auto matrices = bring_matrices(*stack, offsets)) arriving_.push_back(std::move(matrices));
    }
  }
  /// Returns when they have arrived.
  void wait() const {
    for (const auto& matrices : arriving_) matrices->wait();
  }

 private:
  std::vector<std::unique_ptr<ArrivingMatrices>> arriving_{};
};

/// Returns order, inverse and offsets of moe_sort, for the argument `index` of the operator `op`.
std::tuple<at::Tensor, at::Tensor, at::Tensor> sort_slots(const char* op, const at::Tensor& index,
                                                          int64_t experts);

/// Returns t in a dtype that products of `compute` read: fp64 for fp64, else another.
inline at::Tensor readable(const at::Tensor& t, at::ScalarType compute) {
  const bool other = (t.scalar_type() == at::kDouble) != (compute == at::kDouble);
  return other ? t.to(compute) : t;
}

/// Returns readable(t) with contiguous rows, which can be gathered.
inline at::Tensor gatherable(const at::Tensor& t, at::ScalarType compute) {
  const at::Tensor read = readable(t, compute);
  return read.stride(-1) == 1 || read.size(-1) == 1 ? read : read.contiguous();
}

/// Returns an empty tensor for results in the dtype `wanted`, or in `compute` if products of `compute` cannot
/// write that dtype.
inline at::Tensor empty_results(at::IntArrayRef sizes, const at::Tensor& like, at::ScalarType wanted,
                                at::ScalarType compute) {
  const bool direct = (wanted == at::kDouble) == (compute == at::kDouble);
  return in_huge_pages(at::empty(sizes, like.options().dtype(direct ? wanted : compute)));
}

/// Returns for each expert the sum of the rows of its slots, each times its element of `scale` if that is
/// defined, in fp32, or fp64 for fp64.
at::Tensor sum_by_expert(const at::Tensor& matrix, c10::ArrayRef<int64_t> offsets,
                         c10::ArrayRef<int64_t> rows = {}, const at::Tensor& scale = {});

}  // namespace shoestring::experts
