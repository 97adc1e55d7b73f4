#pragma once

// The products of grouped_linear on CUDA, for it and for moe_experts. The offsets and rows stay on the GPU.

#include <optional>
#include <utility>

#include <ATen/core/Tensor.h>

#include "core/tensors.h"
#include "experts/grouped_linear_table.h"

namespace shoestring::experts {

using at::Tensor;

/// Returns the kernels for operands of a dtype.
const kernels::GroupedLinearCuda::Kernels& grouped_kernels(at::ScalarType type);

/// Returns the dtype of the operands: fp32 instead of 16 bits if the GPU has no tensor cores for these.
at::ScalarType grouped_operand_type(at::ScalarType type);

/// Returns the dtype of sums.
inline at::ScalarType grouped_sum_type(at::ScalarType operands) {
  return operands == at::kDouble ? at::kDouble : at::kFloat;
}

/// Returns t in a dtype, with contiguous rows.
inline Tensor grouped_operand(const Tensor& t, at::ScalarType type) {
  const Tensor converted = t.to(type);
  return converted.stride(-1) == 1 ? converted : converted.contiguous();
}

inline kernels::GroupedMatrix grouped_matrix(const Tensor& t) {
  return {t.const_data_ptr(), t.stride(-2), t.dim() == 3 ? t.stride(0) : 0};
}

/// The slots of a call. The tensors must live until the launches.
struct CudaSlots {
  CudaSlots(const Tensor& offsets, const std::optional<Tensor>& rows, int64_t tokens, Tensor order = {})
      : offsets(offsets.contiguous()), rows(rows.has_value() ? rows->contiguous() : Tensor()),
        order(std::move(order)), tokens(tokens) {}

  /// Slots that refer to rows of x, and slots that are rows.
  kernels::GroupedSlots referring() const {
    kernels::GroupedSlots slots = plain();
    if (rows.defined()) slots.rows = rows.const_data_ptr<int64_t>();
    return slots;
  }
  kernels::GroupedSlots plain() const {
    return {offsets.const_data_ptr<int64_t>(),
            nullptr,
            offsets.size(0) - 1,
            count(),
            tokens,
            order.defined() ? order.const_data_ptr<int64_t>() : nullptr};
  }
  int64_t count() const { return rows.defined() ? rows.size(0) : tokens; }

  Tensor offsets, rows, order;  // order: see GroupedSlots
  int64_t tokens;
};

/// A stack of matrices as second operand: (groups, columns, depth), or (groups, depth, columns).
struct GroupedFactor {
  Tensor stack;
  bool depth_first = false;

  int64_t columns() const { return stack.size(depth_first ? 2 : 1); }
  int64_t depth() const { return stack.size(depth_first ? 1 : 2); }
  GroupedFactor narrow(int64_t first, int64_t count) const {
    return {stack.narrow(depth_first ? 2 : 1, first, count), depth_first};
  }
};

/// Writes to `out` the product of the rows of slots with the factors of their groups. bias (groups, columns)
/// is undefined or has the dtype of sums and contiguous rows. out has the dtype of `a`, or that of sums. Rows
/// of slots without a group become 0, or `keep` their values.
void multiply_slots(const kernels::GroupedSlots& slots, const Tensor& a, const GroupedFactor& factor,
                    const Tensor& bias, const Tensor& out, bool keep = false);

/// Writes to each row of `out`, of any dtype, the sum of rows of `products`, which have the dtype of sums and
/// a pitch that is a multiple of four.
void collect_products(const Tensor& products, const kernels::GroupedSums& sums, const Tensor& out);

/// Writes to each row of `out`, of any dtype, the sum of rows of that product. The products of all slots
/// exist for some columns at a time, `width` if that is enough for the kernels, so that they take little
/// memory.
void sum_products(const kernels::GroupedSlots& slots, const Tensor& a, const GroupedFactor& factor,
                  const Tensor& bias, const kernels::GroupedSums& sums, int64_t width, const Tensor& out);

/// Returns for each group the sum over its slots of a[s]^T b[rows[s]], or of a[rows[s]]^T b[s] if `turned`,
/// with the shape and dtype of `weight`.
Tensor add_products(const kernels::GroupedSlots& slots, const Tensor& a, const Tensor& b, bool turned,
                    const Tensor& weight);

/// Returns for each group the sum of a[s], or of a[rows[s]] if `refer`, each times its element of `scale` if
/// that is defined, in the dtype of sums.
Tensor add_rows(const kernels::GroupedSlots& slots, const Tensor& a, bool refer = false,
                const Tensor& scale = {});

}  // namespace shoestring::experts
