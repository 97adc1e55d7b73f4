#pragma once

#include <functional>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include "gemm/packed_gemm.h"

namespace shoestring::gemm {

/// Matrices whose rows belong to groups, such as the tokens of experts, on the CPU. The slots
/// [offsets[e], offsets[e + 1]) are those of group e. A slot is a row of a matrix, or refers to one.
struct Slots {
  at::Tensor matrix;  // fp32, fp64, bf16 or fp16, with contiguous rows
  c10::ArrayRef<int64_t> rows{};
  bool refers = false;  // whether slot s is row rows[s] of `matrix`, or else row s

  /// Returns the rows of the slots [first, last), or the transpose of them, as an operand.
  Factor operand(int64_t first, int64_t last, bool transposed) const {
    if (refers) return {matrix, rows.slice(first, last - first), transposed};
    const at::Tensor part = matrix.narrow(0, first, last - first);
    return transposed ? part.t() : part;
  }
  Slots columns(int64_t first, int64_t count) const { return {matrix.narrow(1, first, count), rows, refers}; }
};

/// Returns the columns [first, last) of the right operand of a group, of shape (depth, last - first).
using GroupOperand = c10::function_ref<Factor(int64_t group, int64_t first, int64_t last)>;

/// A product that is added to that of a slot: row s of `low` (slots, rank) times b of its group. There is
/// none if `low` is undefined.
struct SlotTerm {
  at::Tensor low{};
  std::function<Factor(int64_t group, int64_t first, int64_t last)> b{};
};

// The functions below round the operands to `compute`, fp32 or bf16, and add products in fp32. With fp64 for
// `compute`, operands and results are fp64 tensors. Each result is written, and 16-bit results are rounded
// once. Groups run side by side. The results do not depend on the number of threads.

/// Computes out (slots, n): row s is row s of `a` times the operand of its group, plus the group's row of
/// `offset` (groups, n), which is undefined, or contiguous in fp32 or fp64, plus `more`. Slots of no group
/// become 0.
void multiply_slots(at::ScalarType compute, const at::Tensor& out, const Slots& a,
                    c10::ArrayRef<int64_t> offsets, GroupOperand b, const at::Tensor& offset = {},
                    const SlotTerm& more = {});

/// Computes out (rows, n): row i is the sum over all slots s with rows[s] = i of scale[s] times (row s of `a`
/// times the operand of its group, plus the group's row of `offset`, plus `more`). Adds them in the order of
/// the slots.
/// Without `scale`, a contiguous tensor (slots) of the dtype of the sums, fp32 or fp64, the scales are 1.
void sum_slots(at::ScalarType compute, const at::Tensor& out, const at::Tensor& a,
               c10::ArrayRef<int64_t> rows, c10::ArrayRef<int64_t> offsets, GroupOperand b,
               const at::Tensor& offset = {}, const at::Tensor& scale = {}, const SlotTerm& more = {});

/// Computes out (groups, m, n): the sum over the slots of a group of row s of `a` times row s of `b`,
/// a^T b. The result of a group without slots is 0.
void multiply_by_group(at::ScalarType compute, const at::Tensor& out, const Slots& a, const Slots& b,
                       c10::ArrayRef<int64_t> offsets);

}  // namespace shoestring::gemm
